//! Tests of the rendezvous with fewer ranks, with threads as processes.

use super::*;
use std::net::TcpListener as StdListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

const STEP_TIMEOUT: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(1500);
const LONG: Duration = Duration::from_mins(1);

#[derive(Default)]
struct Files(AtomicBool);

impl RunFiles for Files {
    fn is_finished(&self) -> Result<bool> {
        Ok(self.0.load(Ordering::Relaxed))
    }

    fn progress(&self) -> String {
        "step 7".to_owned()
    }
}

/// A run of four ranks in a temporary directory.
struct Run {
    directory: tempfile::TempDir,
    files: Files,
    endpoint: Option<Endpoint>,
    sizes: WorldSizes,
    timeout: Duration,
}

/// The result of a process: its rank, the ranks of the launcher, and a sum over the ranks.
type Part = (usize, Vec<usize>, f64);

impl Run {
    fn new(min_ranks: usize, timeout: Duration) -> Self {
        let sizes = WorldSizes { min_ranks, micro_batches: 12 };
        Self { directory: tempfile::tempdir().unwrap(), files: Files::default(), endpoint: None, sizes, timeout }
    }

    fn connect(&self, rank: usize, secret: Option<Secret>) -> Result<Option<Joined>, String> {
        self.connect_with(rank, 4, self.sizes, secret)
    }

    fn connect_with(
        &self,
        rank: usize,
        world_size: usize,
        sizes: WorldSizes,
        secret: Option<Secret>,
    ) -> Result<Option<Joined>, String> {
        let world = World { rank, world_size, local_rank: Some(rank), local_world_size: None, job: None };
        let timeouts = Timeouts { rendezvous: self.timeout, step: STEP_TIMEOUT };
        let elastic = Elastic { directory: self.directory.path(), sizes, files: &self.files };
        connect(&world, self.endpoint.as_ref(), secret, timeouts, &elastic).map_err(|error| format!("{error:#}"))
    }

    /// Meets the other ranks and adds up `rank + 1` of the launcher. Returns `None` if the run has finished.
    fn part(&self, rank: usize, secret: Option<Secret>) -> Result<Option<Part>, String> {
        let Some(Joined { connected, members, lock }) = self.connect(rank, secret)? else { return Ok(None) };
        let mut sum = [1.0 + rank as f64];
        let Some(Connected { mut group, .. }) = connected else {
            assert!(lock.is_some());
            return Ok(Some((0, members.ranks, sum[0])));
        };
        group.all_reduce_sum_f64(&mut sum).map_err(|error| error.to_string())?;
        assert_eq!(lock.is_some(), group.rank == 0);
        group.leave();
        Ok(Some((group.rank, members.ranks, sum[0])))
    }

    fn parts(&self, ranks: &[usize]) -> Vec<Result<Option<Part>, String>> {
        thread::scope(|scope| {
            let threads: Vec<_> = ranks.iter().map(|&rank| scope.spawn(move || self.part(rank, None))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

fn free_endpoint() -> Endpoint {
    let port = StdListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    Endpoint::Tcp(format!("127.0.0.1:{port}"))
}

#[test]
fn all_ranks_meet_at_once_at_every_kind_of_endpoint() {
    let shared = tempfile::tempdir().unwrap();
    for endpoint in [None, Some(Endpoint::File(shared.path().to_owned())), Some(free_endpoint())] {
        let run = Run { endpoint, ..Run::new(2, LONG) };
        let start = Instant::now();
        for (rank, part) in run.parts(&[0, 1, 2, 3]).into_iter().enumerate() {
            assert_eq!(part, Ok(Some((rank, vec![0, 1, 2, 3], 10.0))), "{:?}", run.endpoint);
        }
        assert!(start.elapsed() < LONG / 2);
    }
}

#[test]
fn the_ranks_that_come_are_numbered_again() {
    for (missing, endpoint) in [(0, None), (2, Some(free_endpoint()))] {
        let run = Run { endpoint, ..Run::new(2, SHORT) };
        let ranks: Vec<usize> = (0..4).filter(|&rank| rank != missing).collect();
        for (rank, part) in run.parts(&ranks).into_iter().enumerate() {
            assert_eq!(part, Ok(Some((rank, ranks.clone(), 10.0 - 1.0 - missing as f64))));
        }
    }
}

#[test]
fn one_rank_can_continue_alone() {
    assert_eq!(Run::new(1, SHORT).parts(&[2]), [Ok(Some((0, vec![2], 3.0)))]);
}

#[test]
fn too_few_ranks_are_an_error_of_all() {
    let errors = Run::new(3, SHORT).parts(&[0, 3]);
    let texts: Vec<_> = errors.into_iter().map(Result::unwrap_err).collect();
    assert!(texts[0].starts_with("rendezvous: expected at least 3 ranks (--min-ranks) within "), "{texts:?}");
    assert!(texts[0].contains("found 2 (ranks 0, 3); start ranks 1, 2 again") && texts[0] == texts[1], "{texts:?}");
    let text = Run { sizes: WorldSizes { min_ranks: 3, micro_batches: 2 }, ..Run::new(3, SHORT) }.part(0, None);
    assert!(
        text.unwrap_err().starts_with("--min-ranks 3: expected a number of ranks from 3 to 4 that divides the 2 m")
    );
}

/// Two of three ranks fit the batch. The third one takes part when one of them is lost.
#[test]
fn a_spare_rank_joins_after_the_next_loss() {
    let run = &Run { sizes: WorldSizes { min_ranks: 2, micro_batches: 4 }, ..Run::new(2, SHORT) };
    thread::scope(|scope| {
        // It leads the first rendezvous.
        let spare = scope.spawn(|| run.part(3, None));
        thread::sleep(SHORT / 3);
        let lost = scope.spawn(|| run.connect(1, None).unwrap().unwrap());
        let first = run.connect(0, None).unwrap().unwrap();
        assert_eq!((&*first.members.ranks, &*first.members.spare), (&[0, 1][..], &[3][..]));
        drop(lost.join().unwrap());
        thread::sleep(Duration::from_secs(1));
        assert!(!spare.is_finished());
        // Rank 0 ends, because rank 1 is lost, and comes again.
        drop(first);
        assert_eq!(run.part(0, None), Ok(Some((0, vec![0, 3], 5.0))));
        assert_eq!(spare.join().unwrap(), Ok(Some((1, vec![0, 3], 5.0))));
    });
}

#[test]
fn a_late_rank_waits_for_the_next_restart_or_for_the_end() {
    for finishes in [false, true] {
        let run = &Run::new(1, SHORT);
        thread::scope(|scope| {
            let first = run.connect(0, None).unwrap().unwrap();
            let late = scope.spawn(|| run.part(1, None));
            thread::sleep(SHORT + Duration::from_secs(1));
            assert!(!late.is_finished());
            run.files.0.store(finishes, Ordering::Relaxed);
            drop(first);
            let expected = (!finishes).then(|| (0, vec![1], 2.0));
            assert_eq!(late.join().unwrap(), Ok(expected));
        });
    }
}

/// The process of a lost rank waits for the end of the run, which does not end.
#[test]
fn a_rank_that_is_part_of_the_run_in_progress_fails_after_the_timeout() {
    let run = Run::new(1, Duration::from_secs(6));
    let _first = run.connect(2, None).unwrap().unwrap();
    let text = run.part(2, None).unwrap_err();
    assert!(
        text.starts_with("rank 2: expected the run in ") && text.contains("replaces its rank 2, found it in"),
        "{text}"
    );
}

#[test]
fn a_second_process_of_a_rank_is_rejected() {
    let run = &Run::new(2, Duration::from_secs(4));
    thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || run.part(rank, None)));
        thread::sleep(Duration::from_secs(1));
        let text = run.part(1, None).unwrap_err();
        assert!(text.starts_with("rank 1: expected one process, found two, "), "{text}");
        for (rank, part) in ranks.into_iter().enumerate() {
            assert_eq!(part.join().unwrap(), Ok(Some((rank, vec![0, 1], 3.0))));
        }
    });
}

/// Returns the introduction of rank 1 of 4.
fn hello(run: &Run, protocol: &str, applicant: Option<Applicant>) -> Hello {
    let name = run.directory.path().display().to_string();
    let (host, nonce) = (Host::here(), super::super::Nonce::random().unwrap());
    Hello { protocol: protocol.to_owned(), run: name, rank: 1, world_size: 4, host, process: 5, nonce, applicant }
}

#[test]
fn ranks_with_other_flags_or_programs_are_rejected() {
    let endpoint = free_endpoint();
    let Endpoint::Tcp(address) = &endpoint else { unreachable!() };
    let run = &Run { endpoint: Some(endpoint.clone()), ..Run::new(1, Duration::from_secs(6)) };
    thread::scope(|scope| {
        let first = scope.spawn(|| run.part(0, None));
        thread::sleep(Duration::from_secs(1));
        let sizes = |min_ranks, micro_batches| WorldSizes { min_ranks, micro_batches };
        let flags = "expected world size 4, --min-ranks 1 and 12 micro-batches in a step as on rank 0, found";
        for (rank, world_size, sizes, expected) in [
            (1, 4, sizes(2, 12), format!("{flags} 4, 2 and 12; start all ranks with the same flags")),
            (1, 4, sizes(1, 24), format!("{flags} 4, 1 and 24; ")),
            (1, 5, sizes(1, 12), format!("{flags} 5, 1 and 12; ")),
            (4, 4, sizes(1, 12), "expected a rank below 4, found 4; give each process its own rank".to_owned()),
        ] {
            let text = run.connect_with(rank, world_size, sizes, None).err().unwrap();
            assert!(text.starts_with(&format!("rank {rank} (")) && text.contains(&expected), "{text}");
        }
        let applicant = Applicant { sizes: run.sizes, port: 1, addresses: Vec::new() };
        let older = format!("{}0", super::super::PROTOCOL_PREFIX);
        for (protocol, applicant) in [(PROTOCOL, None), (&*older, Some(applicant))] {
            let stream = TcpStream::connect_timeout(&address.parse().unwrap(), STEP_TIMEOUT).unwrap();
            send_json(&stream, &hello(run, protocol, applicant)).unwrap();
            let reply = receive_json(&stream).unwrap();
            let expected =
                "expected the same version of the program and --min-ranks as on rank 0, found another program or no";
            assert!(matches!(&reply, Reply::Rejected { text } if text.contains(expected)), "{reply:?}");
        }
        // None of them takes part.
        assert_eq!(first.join().unwrap(), Ok(Some((0, vec![0], 1.0))));
    });
}

/// The process that leads the rendezvous is frozen, or its host fails.
#[test]
fn a_leader_that_falls_silent_is_left() {
    let endpoint = free_endpoint();
    let Endpoint::Tcp(address) = &endpoint else { unreachable!() };
    let run = &Run { endpoint: Some(endpoint.clone()), ..Run::new(1, SHORT) };
    thread::scope(|scope| {
        let silent = StdListener::bind(address).unwrap();
        let other = scope.spawn(|| run.part(1, None));
        let (stream, _) = silent.accept().unwrap();
        let _: Hello = receive_json(&stream).unwrap();
        send_json(&stream, &Reply::Waiting { running: false, finished: false }).unwrap();
        // It applies again.
        silent.set_nonblocking(true).unwrap();
        let began = Instant::now();
        while silent.accept().is_err() {
            assert!(began.elapsed() < 3 * SILENCE, "rank 1 still waits");
            thread::sleep(Duration::from_millis(20));
        }
        assert!(began.elapsed() > SILENCE / 2, "{:?}", began.elapsed());
        drop((silent, stream));
        assert_eq!(other.join().unwrap(), Ok(Some((0, vec![1], 2.0))));
    });
}

/// Rank 0 of a run that begins in the directory removes the temporary files of killed runs, and those of processes that come late.
#[test]
fn a_rendezvous_file_that_disappears_while_it_is_written_is_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let (place, ended) = (Place::new(None, dir.path(), "run"), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                for entry in std::fs::read_dir(dir.path()).unwrap().flatten() {
                    if entry.file_name().to_string_lossy().starts_with(atomic_file::TEMPORARY_PREFIX) {
                        let _ = std::fs::remove_file(entry.path());
                    }
                }
            }
        });
        let disturbed = (0..500).map(|_| place.lead("run", 3, None).map(|seat| seat.is_none()));
        let disturbed: Result<Vec<bool>> = disturbed.collect();
        ended.store(true, Ordering::Relaxed);
        assert!(disturbed.unwrap().contains(&true), "no file disappeared");
    });
    assert!(place.lead("run", 3, None).unwrap().is_some());
}

#[test]
fn ranks_without_the_secret_are_not_admitted() {
    let [secret, other] = ["0123456789abcdef", "another secret of a stranger"].map(|text| Secret::new(text).unwrap());
    for endpoint in [None, Some(free_endpoint())] {
        let run = &Run { endpoint, ..Run::new(1, Duration::from_secs(3)) };
        thread::scope(|scope| {
            let rank = scope.spawn(|| run.part(0, Some(secret.clone())));
            thread::sleep(Duration::from_millis(500));
            for wrong in [Some(other.clone()), None] {
                // The stranger is not among the ranks, and cannot lead them.
                scope.spawn(|| run.connect(1, wrong));
            }
            assert_eq!(rank.join().unwrap(), Ok(Some((0, vec![0], 1.0))));
        });
    }
}

/// Several groups that start at once form one run: the others wait.
#[test]
fn only_one_group_has_the_lock() {
    let run = &Run::new(1, SHORT);
    let shared = tempfile::tempdir().unwrap();
    let elsewhere = &Endpoint::File(shared.path().to_owned());
    thread::scope(|scope| {
        let here = scope.spawn(|| run.connect(0, None));
        let there = scope.spawn(|| {
            let world = World { rank: 1, world_size: 4, local_rank: Some(0), local_world_size: None, job: None };
            let timeouts = Timeouts { rendezvous: SHORT, step: STEP_TIMEOUT };
            let elastic = Elastic { directory: run.directory.path(), sizes: run.sizes, files: &run.files };
            super::connect(&world, Some(elsewhere), None, timeouts, &elastic)
        });
        let joined = |result: Result<Option<Joined>, String>| result.ok().flatten().and_then(|joined| joined.lock);
        while !here.is_finished() && !there.is_finished() {
            thread::sleep(Duration::from_millis(20));
        }
        thread::sleep(2 * SHORT);
        assert!(here.is_finished() != there.is_finished());
        run.files.0.store(true, Ordering::Relaxed);
        // The lock of the one that has it ends with its thread, so that the other sees the end of the run.
        let locks = if here.is_finished() {
            [joined(here.join().unwrap()), None]
        } else {
            [None, joined(there.join().unwrap().map_err(|error| format!("{error:#}")))]
        };
        assert_eq!(locks.iter().flatten().count(), 1);
    });
}
