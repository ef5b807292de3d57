//! Finds the rank and the world size of this process from flags or the environment variables of its launcher.
//!
//! Supports Open MPI, MPICH, torchrun and SLURM. No MPI library is needed.

use anyhow::{Context, Result, bail, ensure};

/// The position of this process among all processes of the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// Index of this process, from 0 to `world_size` - 1.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// Index among the ranks on this host, if known.
    pub local_rank: Option<usize>,
    /// Number of ranks on this host, if known.
    pub local_world_size: Option<usize>,
    /// The launcher's identifier of the run, if there is one.
    pub job: Option<String>,
}

impl World {
    /// A run of one process.
    pub const SINGLE: Self = Self { rank: 0, world_size: 1, local_rank: Some(0), local_world_size: Some(1), job: None };

    /// Returns whether all ranks may be on one host, as far as is known.
    pub fn may_be_one_host(&self) -> bool {
        self.local_world_size.is_none_or(|local| local == self.world_size)
    }
}

/// Values from the command line. They override the environment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flags {
    /// `--rank`
    pub rank: Option<usize>,
    /// `--world-size`
    pub world_size: Option<usize>,
    /// `--local-rank`
    pub local_rank: Option<usize>,
}

/// The environment variables of a launcher.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
    local_world_size: &'static str,
    /// The values of those that are set identify the job.
    job: &'static [&'static str],
}

/// Launchers that start each process directly.
const LAUNCHERS: [Launcher; 3] = [
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    },
    Launcher {
        name: "MPICH",
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_world_size: "MPI_LOCALNRANKS",
        job: &["PMI_JOBID"],
    },
    Launcher {
        name: "torchrun",
        rank: "RANK",
        world_size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_world_size: "LOCAL_WORLD_SIZE",
        job: &["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"],
    },
];

/// srun. Other launchers inside a SLURM job inherit its variables, which then describe the launcher of the node. They are
/// used only if no other launcher is found, and only inside a job step, because batch scripts also have them.
const SLURM: Launcher = Launcher {
    name: "SLURM",
    rank: "SLURM_PROCID",
    world_size: "SLURM_STEP_NUM_TASKS",
    local_rank: "SLURM_LOCALID",
    local_world_size: "SLURM_TASKS_PER_NODE",
    job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
};
const SLURM_STEP: &str = "SLURM_STEP_ID";

/// PMIx sets the rank of a process but not the world size.
const PMIX_RANK: &str = "PMIX_RANK";

/// An environment variable and its number.
type Variable = (&'static str, usize);

struct Environment<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Environment<'_> {
    fn number(&self, name: &'static str) -> Result<Option<Variable>> {
        let Some(text) = (self.0)(name) else { return Ok(None) };
        match text.parse() {
            Ok(number) => Ok(Some((name, number))),
            Err(_) => bail!("environment variable {name}: expected a whole number, found {text:?}; fix or unset it"),
        }
    }

    /// Returns the world that `launcher` describes, and its rank variable, if this launcher started the process.
    fn world_of(&self, launcher: &Launcher) -> Result<Option<(World, Variable)>> {
        let (rank, world_size) = match (self.number(launcher.rank)?, self.number(launcher.world_size)?) {
            (None, None) => return Ok(None),
            (Some(rank), Some(world_size)) => (rank, world_size),
            (Some((set, _)), None) => bail!(Self::incomplete(launcher, set, launcher.world_size)),
            (None, Some((set, _))) => bail!(Self::incomplete(launcher, set, launcher.rank)),
        };
        ensure!(
            rank.1 < world_size.1,
            "environment variables {}={} and {}={}: expected a rank below the world size; fix or unset them",
            rank.0,
            rank.1,
            world_size.0,
            world_size.1
        );
        let local = |name| Ok::<_, anyhow::Error>(self.number(name)?.map(|(_, number)| number));
        // SLURM sets "8" on one node, "8(x2)" or "8,4" on several. Only the first is a number of local ranks.
        let local_world_size = match launcher.local_world_size {
            "SLURM_TASKS_PER_NODE" => (self.0)("SLURM_TASKS_PER_NODE").and_then(|text| text.parse().ok()),
            name => local(name)?,
        };
        let job: Vec<String> = launcher.job.iter().filter_map(|name| (self.0)(name)).collect();
        let world = World {
            rank: rank.1,
            world_size: world_size.1,
            local_rank: local(launcher.local_rank)?,
            local_world_size,
            job: (!job.is_empty()).then(|| format!("{} {}", launcher.name, job.join("."))),
        };
        Ok(Some((world, rank)))
    }

    fn incomplete(launcher: &Launcher, set: &str, missing: &str) -> String {
        format!(
            "environment variables of {}: expected both {set} and {missing}, found only {set}; unset it to run one process, \
             or give --rank and --world-size",
            launcher.name
        )
    }

    /// Returns the world of the launcher other than SLURM. Launchers that contradict each other are an error.
    fn direct_launcher(&self) -> Result<Option<(World, Variable)>> {
        let mut found: Option<(World, Variable)> = None;
        for launcher in &LAUNCHERS {
            let Some((world, variable)) = self.world_of(launcher)? else { continue };
            match &found {
                None => found = Some((world, variable)),
                Some((first, first_variable)) => ensure!(
                    (first.rank, first.world_size) == (world.rank, world.world_size),
                    "environment variables {}={} and {}={}: expected one rank and world size, found rank {} of {} and rank \
                     {} of {}; unset the wrong ones, or give --rank and --world-size",
                    first_variable.0,
                    first_variable.1,
                    variable.0,
                    variable.1,
                    first.rank,
                    first.world_size,
                    world.rank,
                    world.world_size
                ),
            }
        }
        Ok(found)
    }

    /// Checks that the rank of PMIx agrees with `rank`, the rank that was found and its variable.
    fn check_pmix(&self, rank: Option<Variable>) -> Result<()> {
        let Some((name, pmix_rank)) = self.number(PMIX_RANK)? else { return Ok(()) };
        let Some((variable, rank)) = rank else {
            bail!(
                "environment variable {name}={pmix_rank}: expected also a world size, found none; give --rank and \
                 --world-size, or unset it to run one process"
            )
        };
        // srun sets PMIX_RANK for the launcher of a node. The processes of torchrun and MPICH inherit it.
        let inherited = variable == "RANK" || variable == "PMI_RANK";
        ensure!(
            inherited || pmix_rank == rank,
            "environment variables {variable}={rank} and {name}={pmix_rank}: expected one rank, found two; unset the wrong \
             one, or give --rank and --world-size"
        );
        Ok(())
    }
}

/// Returns the world from the flags, or from the environment variables of a launcher, or [`World::SINGLE`].
/// `variable` looks up an environment variable.
pub fn find(flags: Flags, variable: &dyn Fn(&str) -> Option<String>) -> Result<World> {
    let environment = Environment(variable);
    if let (Some(rank), Some(world_size)) = (flags.rank, flags.world_size) {
        ensure!(
            rank < world_size,
            "--rank: expected a rank below --world-size {world_size}, found {rank}; ranks count from 0"
        );
        return Ok(World { rank, world_size, local_rank: flags.local_rank, local_world_size: None, job: None });
    }
    let slurm = || match variable(SLURM_STEP) {
        Some(_) => environment.world_of(&SLURM),
        None => Ok(None),
    };
    let (mut world, rank) = match (environment.direct_launcher()?, slurm()?) {
        (Some((mut world, rank)), slurm) => {
            // srun --mpi=pmi2 sets the variables of PMI without a local rank.
            let same = slurm.filter(|(slurm, _)| (slurm.rank, slurm.world_size) == (world.rank, world.world_size));
            if let Some((slurm, _)) = same {
                world.local_rank = world.local_rank.or(slurm.local_rank);
                world.job = world.job.or(slurm.job);
            }
            (world, Some(rank))
        }
        (None, Some((world, rank))) => (world, Some(rank)),
        (None, None) => (World::SINGLE, None),
    };
    environment.check_pmix(rank)?;
    if flags.local_rank.is_some() {
        world.local_rank = flags.local_rank;
    }
    Ok(world)
}

/// Returns the world of this process, from the flags or its environment. See [`find`].
pub fn from_environment(flags: Flags) -> Result<World> {
    find(flags, &|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
        .context("cannot find the rank of this process")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)], flags: Flags) -> Result<World> {
        let get = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        find(flags, &get)
    }

    fn world(
        rank: usize,
        world_size: usize,
        local_rank: Option<usize>,
        local_world_size: Option<usize>,
        job: &str,
    ) -> World {
        let job = (!job.is_empty()).then(|| job.to_owned());
        World { rank, world_size, local_rank, local_world_size, job }
    }

    #[test]
    fn the_variables_of_each_launcher_are_read() {
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
            (vec![], World::SINGLE),
            (ompi.to_vec(), world(5, 16, Some(1), Some(4), "Open MPI 3141")),
            (hydra, world(3, 4, Some(2), Some(4), "")),
            (torchrun.to_vec(), world(1, 2, Some(1), Some(2), "torchrun none.29500")),
            (slurm.to_vec(), world(3, 4, Some(1), None, "SLURM 77.0")),
            ([&slurm[..], &[("PMIX_RANK", "3")]].concat(), world(3, 4, Some(1), None, "SLURM 77.0")),
            // srun --mpi=pmi2
            ([&slurm[..], &pmi].concat(), world(3, 4, Some(1), None, "SLURM 77.0")),
            // mpirun inside a SLURM job, where srun started one daemon per node
            ([&ompi[..], &slurm].concat(), world(5, 16, Some(1), Some(4), "Open MPI 3141")),
            // one torchrun per node, started by srun --mpi=pmix
            ([&torchrun[..], &[("PMIX_RANK", "0")]].concat(), world(1, 2, Some(1), Some(2), "torchrun none.29500")),
            (batch_script.to_vec(), World::SINGLE),
        ] {
            assert_eq!(found(&variables, Flags::default()).unwrap(), expected, "{variables:?}");
        }
    }

    #[test]
    fn flags_override_the_environment() {
        let variables = [("RANK", "1"), ("WORLD_SIZE", "2"), ("PMI_RANK", "0"), ("PMI_SIZE", "9")];
        let flags = Flags { rank: Some(3), world_size: Some(4), local_rank: None };
        assert_eq!(found(&variables, flags).unwrap(), world(3, 4, None, None, ""));
        let flags = Flags { local_rank: Some(7), ..Flags::default() };
        assert_eq!(found(&variables[..2], flags).unwrap(), world(1, 2, Some(7), None, ""));
        let flags = Flags { rank: Some(4), world_size: Some(4), local_rank: None };
        let text = found(&[], flags).unwrap_err().to_string();
        assert_eq!(text, "--rank: expected a rank below --world-size 4, found 4; ranks count from 0");
    }

    #[test]
    fn invalid_and_contradicting_variables_are_named() {
        for (variables, expected) in [
            (
                &[("RANK", "1"), ("WORLD_SIZE", "2"), ("PMI_RANK", "0"), ("PMI_SIZE", "2")][..],
                "PMI_RANK=0 and RANK=1: expected one rank and world size, found rank 0 of 2 and rank 1 of 2; unset",
            ),
            (
                &[("RANK", "1"), ("WORLD_SIZE", "2"), ("PMI_RANK", "1"), ("PMI_SIZE", "4")],
                "found rank 1 of 4 and rank 1 of 2;",
            ),
            (
                &[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("PMIX_RANK", "0")],
                "OMPI_COMM_WORLD_RANK=1 and PMIX_RANK=0: expected one rank",
            ),
            (
                &[("WORLD_SIZE", "2")],
                "of torchrun: expected both WORLD_SIZE and RANK, found only WORLD_SIZE; unset it to run one process",
            ),
            (&[("PMI_RANK", "2")], "expected both PMI_RANK and PMI_SIZE, found only PMI_RANK"),
            (&[("PMIX_RANK", "2")], "PMIX_RANK=2: expected also a world size, found none; give --rank"),
            (&[("RANK", "x"), ("WORLD_SIZE", "2")], "environment variable RANK: expected a whole number, found \"x\""),
            (&[("RANK", "2"), ("WORLD_SIZE", "2")], "RANK=2 and WORLD_SIZE=2: expected a rank below the world size"),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "-1")],
                "environment variable LOCAL_RANK: expected a whole number, found \"-1\"",
            ),
        ] {
            let text = found(variables, Flags::default()).unwrap_err().to_string();
            assert!(text.contains(expected), "{variables:?}: {text}");
        }
    }

    #[test]
    fn one_host_is_distinguished_from_several() {
        assert!(world(0, 4, None, None, "").may_be_one_host());
        assert!(world(0, 4, None, Some(4), "").may_be_one_host());
        assert!(!world(0, 4, None, Some(2), "").may_be_one_host());
    }
}
