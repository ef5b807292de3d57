//! Which process of a run this one is, as whatever started it says in the environment. No MPI library is needed for that.

use anyhow::{Context, Result, bail, ensure};

/// Where this process stands among those of the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// 0 ..= `ranks` - 1.
    pub rank: usize,
    pub ranks: usize,
    /// Among the ranks of one host; `None` where nobody has said.
    pub local_rank: Option<usize>,
    /// On this host; `None` where nobody has said.
    pub local_ranks: Option<usize>,
    /// What tells this run from others: the launcher's own name for it.
    pub job: Option<String>,
}

impl World {
    /// A run of one process.
    pub const ALONE: Self = Self { rank: 0, ranks: 1, local_rank: Some(0), local_ranks: Some(1), job: None };

    /// Whether all ranks are known to be on one host, or may be.
    pub fn may_be_one_host(&self) -> bool {
        self.local_ranks.is_none_or(|local| local == self.ranks)
    }
}

/// What the command line says; it wins over the environment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flags {
    pub rank: Option<usize>,
    pub ranks: Option<usize>,
    pub local_rank: Option<usize>,
}

/// A launcher's variables.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    ranks: &'static str,
    local_rank: &'static str,
    local_ranks: &'static str,
    /// Together they name the job; as many of them as are set.
    job: &'static [&'static str],
}

/// Launchers that start each process themselves.
const LAUNCHERS: [Launcher; 3] = [
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        ranks: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_ranks: "OMPI_COMM_WORLD_LOCAL_SIZE",
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    },
    Launcher {
        name: "MPICH",
        rank: "PMI_RANK",
        ranks: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_ranks: "MPI_LOCALNRANKS",
        job: &["PMI_JOBID"],
    },
    Launcher {
        name: "torchrun",
        rank: "RANK",
        ranks: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_ranks: "LOCAL_WORLD_SIZE",
        job: &["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"],
    },
];

/// srun. Its variables are inherited by what the launchers above start inside a SLURM job, where they name the node's launcher,
/// so they count only without those; and only inside a job step, for a batch script has them, too.
const SLURM: Launcher = Launcher {
    name: "SLURM",
    rank: "SLURM_PROCID",
    ranks: "SLURM_STEP_NUM_TASKS",
    local_rank: "SLURM_LOCALID",
    local_ranks: "SLURM_TASKS_PER_NODE",
    job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
};
const SLURM_STEP: &str = "SLURM_STEP_ID";

/// PMIx says which rank a process is, but not of how many.
const PMIX_RANK: &str = "PMIX_RANK";

/// A number from the environment and the variable it came from.
type Found = (&'static str, usize);

struct Environment<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Environment<'_> {
    fn number(&self, name: &'static str) -> Result<Option<Found>> {
        let Some(text) = (self.0)(name) else { return Ok(None) };
        match text.parse() {
            Ok(number) => Ok(Some((name, number))),
            Err(_) => bail!("{name}={text} in the environment: expected a whole number"),
        }
    }

    /// What a launcher says, if it was one that started this process.
    fn world_of(&self, launcher: &Launcher) -> Result<Option<(World, Found)>> {
        let (rank, ranks) = (self.number(launcher.rank)?, self.number(launcher.ranks)?);
        let (rank, ranks) = match (rank, ranks) {
            (None, None) => return Ok(None),
            (Some(rank), Some(ranks)) => (rank, ranks),
            (Some((set, _)), None) => bail!("{set} is set, {} is not: {}", launcher.ranks, Self::half(launcher)),
            (None, Some((set, _))) => bail!("{set} is set, {} is not: {}", launcher.rank, Self::half(launcher)),
        };
        ensure!(
            rank.1 < ranks.1,
            "{}={} and {}={} in the environment: expected a rank below the number of ranks",
            rank.0,
            rank.1,
            ranks.0,
            ranks.1
        );
        let local = |name| Ok::<_, anyhow::Error>(self.number(name)?.map(|(_, number)| number));
        // "8", or "8(x2)" for several nodes, or "8,4".
        let local_ranks = match launcher.local_ranks {
            "SLURM_TASKS_PER_NODE" => (self.0)("SLURM_TASKS_PER_NODE").and_then(|text| text.parse().ok()),
            name => local(name)?,
        };
        let job: Vec<String> = launcher.job.iter().filter_map(|name| (self.0)(name)).collect();
        let world = World {
            rank: rank.1,
            ranks: ranks.1,
            local_rank: local(launcher.local_rank)?,
            local_ranks,
            job: (!job.is_empty()).then(|| format!("{} {}", launcher.name, job.join("."))),
        };
        Ok(Some((world, rank)))
    }

    fn half(launcher: &Launcher) -> String {
        format!(
            "half of what {} sets; unset it to run alone, or give --rank and --world-size to be sure",
            launcher.name
        )
    }
}

/// Which process of the run this one is: by the flags, else by the launcher's variables, else alone. Launchers that contradict
/// each other are an error.
pub fn find(flags: Flags, variable: &dyn Fn(&str) -> Option<String>) -> Result<World> {
    let environment = Environment(variable);
    if let (Some(rank), Some(ranks)) = (flags.rank, flags.ranks) {
        ensure!(rank < ranks, "--rank {rank} --world-size {ranks}: expected a rank below the number of ranks");
        return Ok(World { rank, ranks, local_rank: flags.local_rank, local_ranks: None, job: None });
    }
    let mut found: Option<(World, Found)> = None;
    for launcher in &LAUNCHERS {
        let Some((world, by)) = environment.world_of(launcher)? else { continue };
        match &found {
            None => found = Some((world, by)),
            Some((first, first_by)) => ensure!(
                (first.rank, first.ranks) == (world.rank, world.ranks),
                "{}={} says rank {} of {}, {}={} says rank {} of {}: unset what is not true, or give --rank and \
                 --world-size",
                first_by.0,
                first_by.1,
                first.rank,
                first.ranks,
                by.0,
                by.1,
                world.rank,
                world.ranks
            ),
        }
    }
    let slurm = if variable(SLURM_STEP).is_some() { environment.world_of(&SLURM)? } else { None };
    let (mut world, by) = match (found, slurm) {
        (Some((mut world, by)), slurm) => {
            // srun --mpi=pmi2 sets PMI's variables, but no local rank.
            let same = slurm.filter(|(slurm, _)| (slurm.rank, slurm.ranks) == (world.rank, world.ranks));
            if let Some((slurm, _)) = same {
                world.local_rank = world.local_rank.or(slurm.local_rank);
                world.job = world.job.or(slurm.job);
            }
            (world, Some(by))
        }
        (None, Some((world, by))) => (world, Some(by)),
        (None, None) => (World::ALONE, None),
    };
    if let Some((name, rank)) = environment.number(PMIX_RANK)? {
        let inherited = by.is_some_and(|(by, _)| by == "RANK" || by == "PMI_RANK");
        match by {
            None => bail!(
                "{name}={rank} is set, but nothing says of how many: give --rank and --world-size, or unset it to run alone"
            ),
            Some((by, of)) => ensure!(
                inherited || rank == world.rank,
                "{by}={of} and {name}={rank} contradict each other: unset what is not true, or give --rank and --world-size"
            ),
        }
    }
    if flags.local_rank.is_some() {
        world.local_rank = flags.local_rank;
    }
    Ok(world)
}

/// As [`find`], in this process' environment.
pub fn of_this_process(flags: Flags) -> Result<World> {
    find(flags, &|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
        .context("which rank this process is")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)], flags: Flags) -> Result<World> {
        let get = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        find(flags, &get)
    }

    fn world(rank: usize, ranks: usize, local_rank: Option<usize>, local_ranks: Option<usize>, job: &str) -> World {
        let job = (!job.is_empty()).then(|| job.to_owned());
        World { rank, ranks, local_rank, local_ranks, job }
    }

    #[test]
    fn every_launcher_is_understood() {
        let ompi = [
            ("OMPI_COMM_WORLD_RANK", "5"),
            ("OMPI_COMM_WORLD_SIZE", "16"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
            ("PMIX_NAMESPACE", "3141"),
            ("PMIX_RANK", "5"),
        ];
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_TASKS_PER_NODE", "2(x2)"),
            ("SLURM_JOB_ID", "77"),
            ("SLURM_STEP_ID", "0"),
        ];
        let pmi = [("PMI_RANK", "3"), ("PMI_SIZE", "4")];
        let hydra = [&pmi[..], &[("MPI_LOCALRANKID", "2"), ("MPI_LOCALNRANKS", "4")]].concat();
        let torchrun = [
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("MASTER_PORT", "29500"),
        ];
        let batch_script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_ID", "77")];
        for (variables, expected) in [
            (vec![], World::ALONE),
            (ompi.to_vec(), world(5, 16, Some(1), Some(4), "Open MPI 3141")),
            (hydra, world(3, 4, Some(2), Some(4), "")),
            (torchrun.to_vec(), world(1, 2, Some(1), Some(2), "torchrun none.29500")),
            (slurm.to_vec(), world(3, 4, Some(1), None, "SLURM 77.0")),
            ([&slurm[..], &[("PMIX_RANK", "3")]].concat(), world(3, 4, Some(1), None, "SLURM 77.0")),
            // srun --mpi=pmi2
            ([&slurm[..], &pmi].concat(), world(3, 4, Some(1), None, "SLURM 77.0")),
            // mpirun inside a SLURM job: srun has started its daemons, one a node.
            ([&ompi[..], &slurm].concat(), world(5, 16, Some(1), Some(4), "Open MPI 3141")),
            // torchrun, one a node, under srun --mpi=pmix
            ([&torchrun[..], &[("PMIX_RANK", "0")]].concat(), world(1, 2, Some(1), Some(2), "torchrun none.29500")),
            (batch_script.to_vec(), World::ALONE),
        ] {
            assert_eq!(found(&variables, Flags::default()).unwrap(), expected, "{variables:?}");
        }
    }

    #[test]
    fn flags_win() {
        let variables = [("RANK", "1"), ("WORLD_SIZE", "2"), ("PMI_RANK", "0"), ("PMI_SIZE", "9")];
        let flags = Flags { rank: Some(3), ranks: Some(4), local_rank: None };
        assert_eq!(found(&variables, flags).unwrap(), world(3, 4, None, None, ""));
        let flags = Flags { local_rank: Some(7), ..Flags::default() };
        assert_eq!(found(&variables[..2], flags).unwrap(), world(1, 2, Some(7), None, ""));
        let flags = Flags { rank: Some(4), ranks: Some(4), local_rank: None };
        let text = found(&[], flags).unwrap_err().to_string();
        assert_eq!(text, "--rank 4 --world-size 4: expected a rank below the number of ranks");
    }

    #[test]
    fn what_is_wrong_or_contradicts_is_named() {
        for (variables, expected) in [
            (
                &[("RANK", "1"), ("WORLD_SIZE", "2"), ("PMI_RANK", "0"), ("PMI_SIZE", "2")][..],
                "PMI_RANK=0 says rank 0 of 2, RANK=1 says rank 1 of 2: unset",
            ),
            (&[("RANK", "1"), ("WORLD_SIZE", "2"), ("PMI_RANK", "1"), ("PMI_SIZE", "4")], "says rank 1 of 4, RANK=1"),
            (
                &[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("PMIX_RANK", "0")],
                "OMPI_COMM_WORLD_RANK=1 and PMIX_RANK=0 contradict each other",
            ),
            (
                &[("WORLD_SIZE", "2")],
                "WORLD_SIZE is set, RANK is not: half of what torchrun sets; unset it to run alone",
            ),
            (&[("PMI_RANK", "2")], "PMI_RANK is set, PMI_SIZE is not"),
            (&[("PMIX_RANK", "2")], "PMIX_RANK=2 is set, but nothing says of how many: give --rank"),
            (&[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK=x in the environment: expected a whole number"),
            (
                &[("RANK", "2"), ("WORLD_SIZE", "2")],
                "RANK=2 and WORLD_SIZE=2 in the environment: expected a rank below",
            ),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "-1")],
                "LOCAL_RANK=-1 in the environment: expected a whole number",
            ),
        ] {
            let text = found(variables, Flags::default()).unwrap_err().to_string();
            assert!(text.contains(expected), "{variables:?}: {text}");
        }
    }

    #[test]
    fn one_host_is_told_from_several() {
        assert!(world(0, 4, None, None, "").may_be_one_host());
        assert!(world(0, 4, None, Some(4), "").may_be_one_host());
        assert!(!world(0, 4, None, Some(2), "").may_be_one_host());
    }
}
