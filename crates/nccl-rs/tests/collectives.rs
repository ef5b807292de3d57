//! All calls with a mock of the driver and NCCL. Ranks are threads, and device memory is host memory.

mod mock;

use cuda_driver::{Gpu, Stream};
use half::bf16;
use nccl_rs::{Buffer, Communicator, Element, Error, Reduction, Result, UniqueId, group};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(20);

fn library() -> &'static PathBuf {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // The directory is kept, because the library stays loaded.
        let path = mock::build(&tempfile::tempdir().unwrap().keep(), &[]);
        cuda_driver::load_from(&path).unwrap();
        assert_eq!(nccl_rs::load_from(&path).unwrap().1.to_string(), "2.18.5");
        path
    })
}

/// Runs `rank` on one thread per rank, each with a communicator and a stream.
fn ranks<R: Send>(ranks: usize, rank: impl Fn(Communicator, &Stream) -> R + Sync) -> Vec<R> {
    library();
    let id = UniqueId::from_bytes(UniqueId::new().unwrap().to_bytes());
    let rank = &rank;
    thread::scope(|scope| {
        let run = move |i: usize| {
            let gpu = Gpu::open(0).unwrap();
            let stream = Stream::new(&gpu).unwrap();
            rank(Communicator::new(&gpu, id, i, ranks, TIMEOUT).unwrap(), &stream)
        };
        let threads: Vec<_> = (0..ranks).map(|i| scope.spawn(move || run(i))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn buffer_of<T: Element>(values: &mut [T]) -> Buffer<T> {
    Buffer::new(values.as_mut_ptr().addr() as u64, values.len())
}

#[test]
fn all_reduce_computes_sum_and_mean_of_both_types() {
    for n in [1, 2, 3] {
        let results = ranks(n, |comm, stream| {
            assert_eq!(comm.world_size(), n);
            let mut sum: Vec<f32> = (0..5).map(|i| (i + 10 * comm.rank()) as f32).collect();
            let mut mean: Vec<bf16> = (0..4).map(|i| bf16::from_f32((i + 8 * comm.rank()) as f32)).collect();
            let from = mean.clone();
            // SAFETY: the mock has completed each call when it returns.
            unsafe {
                let buffer = buffer_of(&mut sum);
                comm.all_reduce(buffer, buffer, Reduction::Sum, stream).unwrap();
                comm.all_reduce(buffer_of(&mut mean), buffer_of(&mut from.clone()), Reduction::Mean, stream).unwrap();
            }
            comm.check().unwrap();
            comm.close().unwrap();
            (sum, mean)
        });
        for (sum, mean) in results {
            let ranks = 0..n;
            let expected: Vec<f32> = (0..5).map(|i| ranks.clone().map(|r| (i + 10 * r) as f32).sum()).collect();
            assert_eq!(sum, expected);
            let expected: Vec<f32> =
                (0..4).map(|i| ranks.clone().map(|r| (i + 8 * r) as f32).sum::<f32>() / n as f32).collect();
            assert_eq!(
                mean,
                expected.into_iter().map(|x| bf16::from_bits((x.to_bits() >> 16) as u16)).collect::<Vec<_>>()
            );
        }
    }
}

#[test]
fn reduce_scatter_all_gather_and_broadcast_work_in_place() {
    let results = ranks(3, |comm, stream| {
        let rank = comm.rank();
        let mut values: Vec<f32> = (0..6).map(|i| (100 * rank + i) as f32).collect();
        let mut gathered = [rank as f32; 3];
        let mut root = [rank as f32; 2];
        let whole = buffer_of(&mut values);
        // SAFETY: the mock has completed each call when it returns.
        unsafe {
            comm.reduce_scatter(whole.shard(rank, 3), whole, Reduction::Sum, stream).unwrap();
            let all = buffer_of(&mut gathered);
            comm.all_gather(all, all.shard(rank, 3), stream).unwrap();
            comm.broadcast(buffer_of(&mut root), 2, stream).unwrap();
        }
        comm.close().unwrap();
        (values[2 * rank..2 * rank + 2].to_vec(), gathered, root)
    });
    for (rank, (part, gathered, root)) in results.into_iter().enumerate() {
        let i = 2 * rank;
        assert_eq!(part, [(300 + 3 * i) as f32, (303 + 3 * i) as f32]);
        assert_eq!((gathered, root), ([0.0, 1.0, 2.0], [2.0, 2.0]));
    }
}

/// Four ranks in groups of two: {0, 1} and {2, 3}. The replicas are {0, 2} and {1, 3}.
#[test]
fn split_communicators_reduce_over_their_own_ranks() {
    let results = ranks(4, |comm, stream| {
        let rank = comm.rank();
        let groups = comm.split(rank / 2, rank % 2, 2).unwrap();
        let replicas = comm.split(rank % 2, rank / 2, 2).unwrap();
        assert_eq!((groups.rank(), groups.world_size(), replicas.rank()), (rank % 2, 2, rank / 2));
        let mut gathered = [rank as f32; 2];
        let [mut sum, mut largest, mut all] = [[10f32.powi(rank as i32)]; 3];
        // SAFETY: the mock has completed each call when it returns.
        unsafe {
            let whole = buffer_of(&mut gathered);
            groups.all_gather(whole, whole.shard(rank % 2, 2), stream).unwrap();
            let [sum, largest, all] = [&mut sum, &mut largest, &mut all].map(|values| buffer_of(values));
            replicas.all_reduce(sum, sum, Reduction::Sum, stream).unwrap();
            groups.all_reduce(largest, largest, Reduction::Max, stream).unwrap();
            comm.all_reduce(all, all, Reduction::Sum, stream).unwrap();
        }
        let text = comm.split(0, 2, 2).err().unwrap().to_string();
        assert!(text.starts_with("ncclCommSplit: rank and size: expected a rank less than the size"), "{text}");
        replicas.close().unwrap();
        groups.close().unwrap();
        comm.close().unwrap();
        (gathered, sum[0], largest[0], all[0])
    });
    let expected = [
        ([0.0, 1.0], 101.0, 10.0, 1111.0),
        ([0.0, 1.0], 1010.0, 10.0, 1111.0),
        ([2.0, 3.0], 101.0, 1000.0, 1111.0),
        ([2.0, 3.0], 1010.0, 1000.0, 1111.0),
    ];
    assert_eq!(results, expected);
}

#[test]
fn a_rank_that_does_not_split_causes_a_timeout() {
    library();
    let id = UniqueId::new().unwrap();
    thread::scope(|scope| {
        for rank in 0..2 {
            scope.spawn(move || {
                let gpu = Gpu::open(0).unwrap();
                let comm = Communicator::new(&gpu, id, rank, 2, Duration::from_millis(500)).unwrap();
                if rank == 0 {
                    let error = comm.split(0, 0, 2).err().unwrap().to_string();
                    let seconds =
                        error.strip_prefix("ncclCommSplit timed out after ").and_then(|rest| rest.split_once(" s: "));
                    // A busy machine notices the end of the time later.
                    assert!(
                        seconds.is_some_and(|(seconds, rest)| seconds.parse::<f32>().unwrap() >= 0.5
                            && rest.starts_with("another rank")),
                        "{error}"
                    );
                }
                // The mock's thread of rank 0 never stops waiting for rank 1.
                std::mem::forget(comm);
            });
        }
    });
}

#[test]
fn a_group_is_queued_as_one_call_and_cannot_be_nested() {
    let results = ranks(2, |comm, stream| {
        let (mut a, mut b) = ([1.0f32; 3], [comm.rank() as f32; 4]);
        let (a_at, b_at) = (buffer_of(&mut a), buffer_of(&mut b));
        let two = || -> Result<()> {
            // SAFETY: the mock has completed the calls when the group ends.
            unsafe {
                comm.all_reduce(a_at, a_at, Reduction::Sum, stream)?;
                comm.all_reduce(b_at, b_at, Reduction::Mean, stream)
            }
        };
        group(&comm, two).unwrap();
        let nested = group(&comm, || group(&comm, || Ok::<(), Error>(()))).unwrap_err().to_string();
        // A group can be started after a failed one.
        group(&comm, || Ok::<(), Error>(())).unwrap();
        comm.close().unwrap();
        (a, b, nested)
    });
    for (a, b, nested) in results {
        assert_eq!((a, b), ([2.0; 3], [0.5; 4]));
        assert_eq!(nested, "ncclGroupStart: groups cannot be nested");
    }
}

/// Each rank sends its number to the next one, twice, and receives from the previous one. Rank 3 takes no part.
#[test]
fn transfers_of_a_group_do_not_wait_for_each_other() {
    let results = ranks(4, |comm, stream| {
        let rank = comm.rank();
        let (mut sent, mut first, mut second) = ([rank as f32; 3], [-1.0f32; 3], [bf16::NEG_ONE; 2]);
        let mut again = [bf16::from_f32(rank as f32); 2];
        let (next, previous) = ((rank + 1) % 3, (rank + 2) % 3);
        let mut transfers = || -> Result<()> {
            // SAFETY: the mock has completed the calls when the group ends.
            unsafe {
                comm.receive(buffer_of(&mut first), previous, stream)?;
                comm.send(buffer_of(&mut sent), next, stream)?;
                comm.send(buffer_of(&mut again), next, stream)?;
                comm.receive(buffer_of(&mut second), previous, stream)
            }
        };
        group(&comm, || if rank < 3 { transfers() } else { Ok(()) }).unwrap();
        // SAFETY: the call fails.
        let error = unsafe { comm.send(buffer_of(&mut sent), 4, stream) }.unwrap_err().to_string();
        assert_eq!(error, "ncclSend: rank: expected less than the world size 4, found 4");
        comm.close().unwrap();
        (first[2], second[1].to_f32())
    });
    assert_eq!(results, [(2.0, 2.0), (0.0, 0.0), (1.0, 1.0), (-1.0, -1.0)]);
}

#[test]
fn a_rank_that_does_not_connect_causes_a_timeout() {
    library();
    let gpu = Gpu::open(0).unwrap();
    let begun = Instant::now();
    let timeout = Duration::from_millis(100);
    let error = Communicator::new(&gpu, UniqueId::new().unwrap(), 0, 2, timeout).err().unwrap();
    assert!(matches!(error, Error::Timeout { .. }) && begun.elapsed() >= timeout, "{error}");
    assert!(error.to_string().starts_with("ncclCommInitRankConfig timed out after 0.1 s: another rank"), "{error}");
    let error = Communicator::new(&gpu, UniqueId::new().unwrap(), 2, 2, timeout).err().unwrap();
    assert_eq!(error.to_string(), "ncclCommInitRankConfig: rank: expected less than the world size 2, found 2");
}

#[test]
fn errors_contain_the_message_of_nccl() {
    ranks(2, |comm, stream| {
        let mut values = [0.0f32; 13];
        let buffer = buffer_of(&mut values);
        // SAFETY: the call fails before it writes.
        let error = unsafe { comm.all_reduce(buffer, buffer, Reduction::Sum, stream) }.unwrap_err().to_string();
        assert!(error.starts_with("ncclAllReduce: ncclRemoteError (6): the mock fails at 13; another"), "{error}");
        assert!(comm.check().is_err());
        comm.abort();
    });
}

#[test]
fn a_monitor_reports_a_failure_after_the_call() {
    ranks(2, |comm, stream| {
        let mut values = [1.0f32; 17];
        let buffer = buffer_of(&mut values);
        let monitor = comm.monitor();
        assert!(monitor.check().is_ok());
        // SAFETY: the mock has completed the call when it returns.
        unsafe { comm.all_reduce(buffer, buffer, Reduction::Sum, stream) }.unwrap();
        assert_eq!(values.map(f32::to_bits), [2.0f32.to_bits(); 17]);
        let deadline = Instant::now() + TIMEOUT;
        let found = thread::spawn(move || {
            while Instant::now() < deadline {
                if let Err(error) = monitor.check() {
                    return error.to_string();
                }
                thread::sleep(Duration::from_millis(5));
            }
            String::new()
        });
        assert!(found.join().unwrap().starts_with("NCCL: ncclRemoteError (6)"));
        comm.abort();
    });
}

/// Rank 1 makes no call. A monitor aborts the call of rank 0, which waits for it.
#[test]
fn a_monitor_aborts_a_call_that_waits_for_another_rank() {
    let errors = ranks(2, |comm, stream| {
        if comm.rank() == 1 {
            // The mock's thread of rank 0 never stops waiting for this rank.
            std::mem::forget(comm);
            return String::new();
        }
        let values = Box::leak(Box::new([1.0f32; 3]));
        let (buffer, monitor, begun) = (buffer_of(values), comm.monitor(), Instant::now());
        let abort = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            monitor.abort();
            monitor.check().unwrap();
        });
        // SAFETY: the memory is never freed.
        let error = unsafe { comm.all_reduce(buffer, buffer, Reduction::Sum, stream) }.unwrap_err();
        assert!(begun.elapsed() < TIMEOUT / 4);
        abort.join().unwrap();
        assert!(matches!(error, Error::Closed { .. }) && comm.check().is_err(), "{error}");
        error.to_string()
    });
    assert_eq!(errors[0], "ncclAllReduce: the communicator is closed, or was aborted because another rank failed");
}

#[test]
fn mismatched_lengths_are_rejected() {
    ranks(2, |comm, stream| {
        let (mut five, mut three) = ([0.0f32; 5], [0.0f32; 3]);
        let (five, three) = (buffer_of(&mut five), buffer_of(&mut three));
        // SAFETY: the call fails before it writes.
        let texts = unsafe {
            [
                comm.all_reduce(five, three, Reduction::Sum, stream),
                comm.reduce_scatter(three, five, Reduction::Sum, stream),
                comm.all_gather(five, three, stream),
                comm.broadcast(five, 2, stream),
            ]
        }
        .map(|result| result.unwrap_err().to_string());
        assert_eq!(
            texts,
            [
                "ncclAllReduce: buffers on 2 ranks: expected equal lengths, found 3 elements to 5",
                "ncclReduceScatter: buffers on 2 ranks: expected equal lengths, found 5 elements to 6",
                "ncclAllGather: buffers on 2 ranks: expected equal lengths, found 6 elements to 5",
                "ncclBroadcast: rank: expected less than the world size 2, found 2"
            ]
        );
        comm.close().unwrap();
    });
}

#[test]
fn closed_communicators_are_destroyed_and_dropped_ones_are_aborted() {
    // In another process, so that the communicators of other tests do not count.
    if std::env::var_os("COUNT_ENDS").is_none() {
        let name = "closed_communicators_are_destroyed_and_dropped_ones_are_aborted";
        let this = std::env::current_exe().unwrap();
        let run = std::process::Command::new(this).args(["--exact", name]).env("COUNT_ENDS", "1").status();
        assert!(run.unwrap().success());
        return;
    }
    ranks(2, |comm, _| comm.close().unwrap());
    ranks(3, |comm, _| drop(comm));
    // Aborted once, although it is also dropped.
    ranks(2, |comm, _| comm.monitor().abort());
    // SAFETY: the library is already loaded, and the function has this signature.
    let ended = unsafe {
        let library = libloading::Library::new(library()).unwrap();
        let ended = *library.get::<unsafe extern "C" fn(usize) -> i32>("mockEnded").unwrap();
        [ended(0), ended(1)]
    };
    assert_eq!(ended, [2, 5]);
}
