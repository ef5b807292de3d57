//! Groups of threads.

use super::*;
use std::thread;
use std::time::Instant;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Runs `rank` on one thread per rank and returns the results in rank order.
fn on_ranks<R: Send>(world_size: usize, step_timeout: Duration, rank: impl Fn(&mut TcpGroup) -> R + Sync) -> Vec<R> {
    let rank = &rank;
    thread::scope(|scope| {
        let groups = TcpGroup::in_process(world_size, step_timeout).unwrap();
        let threads: Vec<_> = groups.into_iter().map(|mut group| scope.spawn(move || rank(&mut group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn reductions_are_bitwise_identical_and_in_rank_order() {
    // The tensor is longer than a chunk, and the sum of its values depends on the order.
    let value = |rank: usize, i: usize| [1e8f32, 3.0, -1e8, 0.1][rank] + i as f32 * 1e-3;
    let n = CHUNK_BYTES / 4 + 100;
    let sums = on_ranks(4, TIMEOUT, |group| {
        let mut values: Vec<f32> = (0..n).map(|i| value(group.rank, i)).collect();
        group
            .all_reduce_bytes(Scope::World, bytemuck::cast_slice_mut(&mut values), DType::F32, Reduction::Sum)
            .unwrap();
        values
    });
    let expected: Vec<f32> = (0..n).map(|i| (0..4).map(|rank| value(rank, i)).fold(0.0, |a, b| a + b)).collect();
    assert!(sums.iter().all(|sum| *sum == expected));
    let means = on_ranks(3, TIMEOUT, |group| {
        let mut values = [1.0, 2.5, 256.0].map(|x| bf16::from_f32(x + group.rank as f32));
        group
            .all_reduce_bytes(Scope::World, bytemuck::cast_slice_mut(&mut values), DType::Bf16, Reduction::Mean)
            .unwrap();
        values.map(bf16::to_f32)
    });
    // 257 lies between two bf16 values and rounds to the even one. Only the final result is rounded.
    assert_eq!(means, [[2.0, 3.5, 256.0]; 3]);
    let maxima = on_ranks(3, TIMEOUT, |group| {
        let mut values = [[1.0f32, f32::NAN, 0.0], [3.0, 5.0, 0.0], [2.0, f32::INFINITY, 1e-40]][group.rank];
        group
            .all_reduce_bytes(Scope::World, bytemuck::cast_slice_mut(&mut values), DType::F32, Reduction::Max)
            .unwrap();
        values
    });
    assert_eq!(maxima, [[3.0, f32::INFINITY, 1e-40]; 3]);
    let ints = on_ranks(2, TIMEOUT, |group| {
        group.all_reduce_bytes(Scope::World, &mut [0; 4], DType::I32, Reduction::Sum).is_err()
    });
    assert_eq!(ints, [true, true]);
}

#[test]
fn host_collectives_return_the_values_of_the_right_ranks() {
    for (rank, got) in on_ranks(3, TIMEOUT, |group| {
        let all = group.gather(&[group.rank as u8; 2]).unwrap();
        let message = group.broadcast_message(vec![9; group.rank + 1]).unwrap();
        let mut sums = [0.1 * group.rank as f64, 1.0];
        group.all_reduce_sum_f64(&mut sums).unwrap();
        let mut roots = Vec::new();
        for root in 0..3 {
            let mut bytes = vec![group.rank as u8; CHUNK_BYTES + 3];
            group.broadcast_bytes(Scope::World, &mut bytes, root).unwrap();
            roots.push(bytes.iter().all(|&byte| usize::from(byte) == root));
        }
        (all, message, sums, roots, group.any_rank(group.rank == 1).unwrap(), group.any_rank(false).unwrap())
    })
    .into_iter()
    .enumerate()
    {
        let all = if rank == 0 { vec![vec![0, 0], vec![1, 1], vec![2, 2]] } else { vec![] };
        assert_eq!(got, (all, vec![9], [0.1 + 0.2, 3.0], vec![true; 3], true, false));
    }
}

#[test]
fn all_gather_concatenates_the_parts_on_each_rank() {
    // Longer than a chunk, and empty.
    for n in [CHUNK_BYTES / 3 + 5, 0] {
        let byte = |rank: usize, i: usize| (7 * rank + i % 251) as u8;
        let wholes = on_ranks(3, TIMEOUT, |group| {
            let part: Vec<u8> = (0..n).map(|i| byte(group.rank, i)).collect();
            group.all_gather_bytes(&part).unwrap()
        });
        let expected: Vec<u8> = (0..3).flat_map(|rank| (0..n).map(move |i| byte(rank, i))).collect();
        assert!(wholes.iter().all(|whole| *whole == expected), "{n}");
    }
}

#[test]
fn a_group_of_one_rank_needs_no_peers() {
    let got = on_ranks(1, TIMEOUT, |group| {
        let mut values = [2.0f32];
        group
            .all_reduce_bytes(Scope::World, bytemuck::cast_slice_mut(&mut values), DType::F32, Reduction::Mean)
            .unwrap();
        let gathered = group.gather(b"x").unwrap();
        (values, group.any_rank(false).unwrap(), gathered, group.broadcast_message(vec![1]).unwrap())
    });
    assert_eq!(got, [([2.0], false, vec![b"x".to_vec()], vec![1])]);
}

#[test]
fn a_disconnected_rank_is_named_on_all_ranks() {
    let texts = on_ranks(4, TIMEOUT, |group| {
        group.set_stage("step 17");
        group.any_rank(false).unwrap();
        if group.rank == 2 {
            return String::new();
        }
        group.any_rank(false).unwrap_err().to_string()
    });
    let activity = "step 17 (all-reduce 1, 8 bytes)".to_owned();
    let fault = Fault::Disconnected { peer: "rank 2".to_owned(), activity };
    let text = fault.to_string();
    assert_eq!(texts, [text.clone(), text.clone(), String::new(), text]);
}

#[test]
fn a_rank_that_leaves_because_of_a_fault_is_not_named() {
    let mut groups = TcpGroup::in_process(3, TIMEOUT).unwrap();
    let mut rank_0 = groups.remove(0);
    let fault = Fault::Disconnected { peer: "rank 2".to_owned(), activity: "step 7".to_owned() };
    rank_0.watchdog.report_fault(fault);
    drop(groups);
    let error = rank_0.receive(0, MessageKind::Gather, None).unwrap_err();
    assert!(error.to_string().starts_with("rank 2 disconnected during step 7"), "{error}");
}

#[test]
fn the_end_of_rank_0_is_detected() {
    let texts = on_ranks(3, TIMEOUT, |group| match group.rank {
        0 => String::new(),
        _ => group.broadcast_message(vec![]).unwrap_err().to_string(),
    });
    assert!(texts[1].starts_with("rank 0 disconnected during startup (broadcast 0, 0 bytes):"), "{texts:?}");
    assert_eq!(texts[1], texts[2]);
}

#[test]
fn a_rank_that_makes_no_call_times_out() {
    let timeout = Duration::from_millis(200);
    let start = Instant::now();
    let texts = on_ranks(3, timeout, |group| {
        if group.rank == 1 {
            thread::sleep(4 * timeout);
            return String::new();
        }
        group.any_rank(false).unwrap_err().to_string()
    });
    assert!(start.elapsed() < 10 * timeout);
    assert!(
        texts[0].starts_with("rank 1 timed out: no message for 0 s during startup (all-reduce 0, 8 bytes);"),
        "{texts:?}"
    );
    // Rank 2 waits for rank 0 for as long as rank 0 waits for rank 1, so either timeout may expire first.
    assert!(texts[2] == texts[0] || texts[2].starts_with("rank 0 timed out"), "{texts:?}");
}

#[test]
fn an_error_on_another_rank_is_reported_by_rank_0() {
    let ends = on_ranks(3, TIMEOUT, |group| {
        group.any_rank(false).unwrap();
        let error = if group.rank == 1 {
            anyhow::anyhow!("train_3.bin: no such file").context("--train")
        } else {
            group.any_rank(false).unwrap_err()
        };
        let error = group.abort_run(error);
        (error.to_string(), matches!(error.downcast_ref(), Some(Fault::ReportedByRank0 { recoverable: false, .. })))
    });
    let text = "rank 1 failed: --train: train_3.bin: no such file".to_owned();
    assert_eq!(ends, [(text.clone(), false), (text.clone(), true), (text, true)]);
}

#[test]
fn an_error_on_rank_0_reaches_the_other_ranks() {
    let ends = on_ranks(2, TIMEOUT, |group| match group.rank {
        0 => group.abort_run(anyhow::anyhow!("disk full")).to_string(),
        _ => group.any_rank(false).unwrap_err().to_string(),
    });
    assert_eq!(ends, ["disk full", "disk full"]);
}

#[test]
fn ranks_that_call_different_collectives_are_detected() {
    let texts = on_ranks(2, TIMEOUT, |group| match group.rank {
        0 => group.any_rank(false).unwrap_err().to_string(),
        _ => group.gather(&[]).and_then(|_| group.any_rank(true)).unwrap_err().to_string(),
    });
    let text = "rank 1: expected call 0, Reduce, 8 bytes, found call 0, Gather, 0 bytes; the ranks called different \
                collectives, which is a bug in this program";
    assert_eq!(texts, [text, text]);
    let texts =
        on_ranks(2, TIMEOUT, |group| group.all_reduce_sum_f64(&mut vec![0.0; 1 + group.rank]).unwrap_err().to_string());
    let text = "expected call 0, Reduce, 8 bytes, found call 0, Reduce, 16 bytes";
    assert!(texts[1].contains(text), "{texts:?}");
}

/// Six ranks in groups of three: 0 to 2, and 3 to 5.
#[test]
fn collectives_of_a_scope_combine_its_ranks_only() {
    let n = CHUNK_BYTES / 4 + 100;
    let got = on_ranks(6, TIMEOUT, |group| {
        group.set_shard_size(3).unwrap();
        let rank = group.rank;
        let mut reduce = |scope, reduction| {
            // 1, 10, 100, …: the digits of a sum show its ranks.
            let mut values = vec![10f32.powi(rank as i32); n];
            group.all_reduce_bytes(scope, bytemuck::cast_slice_mut(&mut values), DType::F32, reduction).unwrap();
            assert!(values.iter().all(|value| value.to_bits() == values[0].to_bits()));
            values[0]
        };
        let sums = [Scope::World, Scope::ShardGroup, Scope::Replicas].map(|scope| reduce(scope, Reduction::Sum));
        let mean = reduce(Scope::Replicas, Reduction::Mean);
        let largest = reduce(Scope::ShardGroup, Reduction::Max);
        let mut broadcast = |scope, root| {
            let mut bytes = vec![rank as u8; CHUNK_BYTES + 3];
            group.broadcast_bytes(scope, &mut bytes, root).unwrap();
            assert!(bytes.iter().all(|byte| *byte == bytes[0]));
            bytes[0]
        };
        let roots = [(Scope::World, 4), (Scope::ShardGroup, 0), (Scope::ShardGroup, 2), (Scope::Replicas, 1)];
        let roots = roots.map(|(scope, root)| broadcast(scope, root));
        (sums, mean, largest, roots, group.all_gather_bytes(&[rank as u8; 2]).unwrap())
    });
    for (rank, got) in got.into_iter().enumerate() {
        let first = rank < 3;
        let replicas = [1001.0, 10010.0, 100_100.0][rank % 3];
        let sums = [111_111.0, if first { 111.0 } else { 111_000.0 }, replicas];
        let roots = [4, if first { 0 } else { 3 }, if first { 2 } else { 5 }, 3 + rank as u8 % 3];
        let gathered = if first { [0, 0, 1, 1, 2, 2] } else { [3, 3, 4, 4, 5, 5] };
        let largest = if first { 100.0 } else { 100_000.0 };
        assert_eq!(got, (sums, replicas / 2.0, largest, roots, gathered.to_vec()), "rank {rank}");
    }
}
