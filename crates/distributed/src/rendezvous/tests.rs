//! Tests of the rendezvous: accepted, missing and refused ranks, and unknown programs.

use super::client::UNKNOWN_SERVER_TIMEOUT;
use super::*;
use std::net::{TcpListener, TcpStream};
use std::thread;

const TIMEOUT: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(400);

fn world(rank: usize, world_size: usize, job: &str) -> World {
    World { rank, world_size, local_rank: None, local_world_size: None, job: Some(job.to_owned()) }
}

/// Runs ranks as threads of this process. Returns the local rank and a sum over all ranks, or the error message, of each.
fn rendezvous(worlds: Vec<World>, endpoint: Option<&Endpoint>, timeout: Duration) -> Vec<Result<(usize, f64), String>> {
    let worlds = worlds.into_iter().map(|world| (world, None)).collect();
    rendezvous_with_secrets(worlds, endpoint, timeout)
}

/// Does the same as [`rendezvous`], with a secret for each rank.
fn rendezvous_with_secrets(
    worlds: Vec<(World, Option<Secret>)>,
    endpoint: Option<&Endpoint>,
    timeout: Duration,
) -> Vec<Result<(usize, f64), String>> {
    let run = move |(world, secret): (World, Option<Secret>)| {
        let timeouts = Timeouts { rendezvous: timeout, step: TIMEOUT };
        let mut connected = connect(&world, endpoint, secret, timeouts).map_err(|error| format!("{error:#}"))?;
        let mut sum = [1.0 + world.rank as f64];
        connected.group.all_reduce_sum_f64(&mut sum).map_err(|error| error.to_string())?;
        connected.group.leave();
        Ok((connected.local_rank, sum[0]))
    };
    thread::scope(|scope| {
        let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(move || run(world))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns an endpoint with a port that is free now.
fn free_endpoint() -> Endpoint {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    Endpoint::Tcp(format!("127.0.0.1:{port}"))
}

#[test]
fn endpoints_are_parsed_or_refused() {
    assert_eq!("tcp://node1:29400".parse(), Ok(Endpoint::Tcp("node1:29400".to_owned())));
    assert_eq!("tcp://[::1]:5".parse(), Ok(Endpoint::Tcp("[::1]:5".to_owned())));
    assert_eq!("file:///shared/a".parse(), Ok(Endpoint::File("/shared/a".into())));
    for wrong in ["tcp://node1", "tcp://:1", "tcp://a:0", "tcp://a:66000", "file://here", "node:1", ""] {
        assert!(wrong.parse::<Endpoint>().unwrap_err().contains("expected tcp://HOST:PORT"), "{wrong}");
    }
}

#[test]
fn ranks_connect_by_every_kind_of_endpoint() {
    let dir = tempfile::tempdir().unwrap();
    let file = Endpoint::File(dir.path().to_owned());
    for (i, endpoint) in [Some(free_endpoint()), Some(file), None].iter().enumerate() {
        // Ranks start out of order.
        let worlds = [2, 0, 3, 1].map(|rank| world(rank, 4, &format!("test {} {i}", std::process::id()))).to_vec();
        let results = rendezvous(worlds, endpoint.as_ref(), TIMEOUT);
        assert_eq!(results, [2, 0, 3, 1].map(|local_rank| Ok((local_rank, 10.0))), "{endpoint:?}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "the rendezvous file is removed");
}

#[test]
fn the_local_rank_of_the_launcher_takes_precedence() {
    let worlds = vec![world(0, 2, "local"), World { local_rank: Some(5), ..world(1, 2, "local") }];
    assert_eq!(rendezvous(worlds, Some(&free_endpoint()), TIMEOUT), [Ok((0, 3.0)), Ok((5, 3.0))]);
}

#[test]
fn missing_ranks_are_named_on_all_ranks() {
    let all =
        rendezvous(vec![world(0, 5, "few"), world(1, 5, "few"), world(3, 5, "few")], Some(&free_endpoint()), SHORT);
    let text = "rendezvous: expected 5 ranks within 0 s, found 3 (ranks 0, 1, 3), missing ranks 2, 4; see the output of the \
                missing ranks, check that they can reach rank 0, or increase --rendezvous-timeout";
    assert_eq!(all, [Err(text.to_owned()), Err(text.to_owned()), Err(text.to_owned())]);
    let single = rendezvous(vec![world(0, 2, "few")], Some(&free_endpoint()), SHORT).remove(0).unwrap_err();
    assert!(
        single.starts_with("rendezvous: expected 2 ranks within 0 s, found 1 (rank 0), missing rank 1;"),
        "{single}"
    );
}

/// Returns the results of ranks 0 and 2 of 4 when rank 1 sends `protocol` and disconnects before rank 3 connects.
fn results_after_client(protocol: &str) -> Vec<Result<(usize, f64), String>> {
    let endpoint = free_endpoint();
    let Endpoint::Tcp(address) = &endpoint else { unreachable!() };
    thread::scope(|scope| {
        let waiting =
            scope.spawn(|| rendezvous(vec![world(0, 4, "ends"), world(2, 4, "ends")], Some(&endpoint), TIMEOUT));
        thread::sleep(SHORT);
        let stream = TcpStream::connect(address).unwrap();
        let host = Host { name: "node7".to_owned(), boot: String::new() };
        let (protocol, run) = (protocol.to_owned(), "ends".to_owned());
        send_json(
            &stream,
            &Hello {
                protocol,
                run,
                rank: 1,
                world_size: 4,
                host,
                process: 5,
                nonce: Nonce::default(),
                applicant: None,
            },
        )
        .unwrap();
        assert!(matches!(receive_json(&stream).unwrap(), Reply::Wait));
        drop(stream);
        waiting.join().unwrap()
    })
}

#[test]
fn a_rank_that_disconnects_during_the_rendezvous_is_named_on_all_ranks() {
    let text = "rank 1 (node7, process 5) disconnected during the rendezvous: its process ended or the network failed; see the \
                output of that rank";
    assert_eq!(results_after_client(PROTOCOL), [Err(text.to_owned()), Err(text.to_owned())]);
}

#[test]
fn a_rank_of_another_version_is_named_on_all_ranks() {
    let text = "rank 1 (node7, process 5): expected the same version of the program as on rank 0, found another; install one \
                version on all hosts";
    assert_eq!(results_after_client("llm.rs ranks 1"), [Err(text.to_owned()), Err(text.to_owned())]);
}

#[test]
fn a_missing_rank_0_is_reported() {
    // No other test can listen on the port of a connected socket.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let closed = Endpoint::Tcp(connected.local_addr().unwrap().to_string());
    for (endpoint, reason) in
        [(closed, "Connection refused"), (Endpoint::File("/tmp".into()), "no address was found there")]
    {
        let text = rendezvous(vec![world(1, 2, "no rank 0")], Some(&endpoint), SHORT).remove(0).unwrap_err();
        assert!(text.starts_with("rank 1 of 2: expected rank 0 at ") && text.contains(reason), "{text}");
    }
}

#[test]
fn duplicate_ranks_and_different_world_sizes_are_refused() {
    let all = rendezvous(
        vec![world(0, 3, "twice"), world(1, 3, "twice"), world(1, 3, "twice")],
        Some(&free_endpoint()),
        TIMEOUT,
    );
    let text = all[0].clone().unwrap_err();
    assert!(
        text.starts_with("rank 1: expected one process, found two, rank 1 (") && all == vec![Err(text); 3],
        "{all:?}"
    );
    let all = rendezvous(vec![world(0, 2, "size"), world(1, 3, "size")], Some(&free_endpoint()), TIMEOUT);
    let text = all[0].clone().unwrap_err();
    assert!(text.contains(": expected world size 2 as on rank 0, found 3;") && all[1] == Err(text), "{all:?}");
}

#[test]
fn ranks_of_different_runs_do_not_connect() {
    let endpoint = free_endpoint();
    let all = rendezvous(vec![world(0, 2, "mine"), world(1, 2, "yours")], Some(&endpoint), SHORT);
    assert!(all[0].as_ref().unwrap_err().starts_with("rendezvous: expected 2 ranks"), "{all:?}");
    assert!(all[1].as_ref().unwrap_err().contains("is rank 0 of another run"), "{all:?}");
    // Two runs in one directory.
    let dir = tempfile::tempdir().unwrap();
    let file = Endpoint::File(dir.path().to_owned());
    let worlds = [(0, "a"), (0, "b"), (1, "b"), (1, "a")].map(|(rank, job)| world(rank, 2, job)).to_vec();
    assert!(rendezvous(worlds, Some(&file), TIMEOUT).iter().all(Result::is_ok));
}

#[test]
fn the_rendezvous_file_of_an_earlier_run_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(format!("rendezvous-{:016x}.json", xxh3_64(b"again")));
    // By now its port belongs to a process of another run.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let stale = RendezvousFile::new("again 1 2".to_owned(), other.local_addr().unwrap().port(), None);
    fs::write(&path, serde_json::to_vec(&stale).unwrap()).unwrap();
    let endpoint = Endpoint::File(dir.path().to_owned());
    let results = thread::scope(|scope| {
        scope.spawn(|| {
            let (stream, _) = other.accept().unwrap();
            let hello: Hello = receive_json(&stream).unwrap();
            assert_eq!(hello.run, "again 1 2");
            send_json(&stream, &Reply::OtherRun).unwrap();
        });
        let late = scope.spawn(|| rendezvous(vec![world(1, 2, "again")], Some(&endpoint), TIMEOUT).remove(0));
        thread::sleep(SHORT);
        let first = rendezvous(vec![world(0, 2, "again")], Some(&endpoint), TIMEOUT).remove(0);
        (first, late.join().unwrap())
    });
    assert_eq!(results, (Ok((0, 3.0)), Ok((1, 3.0))));
}

#[test]
fn connections_of_unknown_programs_are_ignored() {
    let endpoint = free_endpoint();
    let Endpoint::Tcp(address) = &endpoint else { unreachable!() };
    let results = thread::scope(|scope| {
        let zero = scope.spawn(|| rendezvous(vec![world(0, 2, "unknown")], Some(&endpoint), TIMEOUT).remove(0));
        let open = || {
            (0..200)
                .find_map(|_| {
                    thread::sleep(RETRY_INTERVAL / 10);
                    TcpStream::connect(address).ok()
                })
                .unwrap()
        };
        open().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        drop(open());
        let one = rendezvous(vec![world(1, 2, "unknown")], Some(&endpoint), TIMEOUT).remove(0);
        (zero.join().unwrap(), one)
    });
    assert_eq!(results, (Ok((0, 3.0)), Ok((1, 3.0))));
}

#[test]
fn an_address_that_rank_0_cannot_listen_on_is_reported() {
    let zero =
        |endpoint: &Endpoint| rendezvous(vec![world(0, 2, "port")], Some(endpoint), SHORT).remove(0).unwrap_err();
    let used = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = used.local_addr().unwrap();
    assert_eq!(
        zero(&Endpoint::Tcp(address.to_string())),
        format!(
            "rank 0: cannot listen on {address}: Address already in use (os error 98); find the process that uses the port \
             with `ss -ltnp` and stop it, or give all ranks another port with --rendezvous tcp://HOST:PORT"
        )
    );
    let text = zero(&Endpoint::Tcp("no.such.host.invalid:5000".to_owned()));
    assert!(
        text.starts_with("rank 0: cannot listen on no.such.host.invalid:5000: ")
            && text.contains("; give all ranks an address or a name of rank 0's host with --rendezvous"),
        "{text}"
    );
    // An address that is not local, as behind NAT.
    let Endpoint::Tcp(free) = free_endpoint() else { unreachable!() };
    let elsewhere = free.replace("127.0.0.1", "192.0.2.1");
    let text = zero(&Endpoint::Tcp(elsewhere));
    let here = Host::here().name;
    assert!(
        text.starts_with("rendezvous: expected 2 ranks")
            && text.contains(&format!(" reach rank 0 (192.0.2.1 is not an address of its host, {here}), or increase ")),
        "{text}"
    );
    let hosts = World { local_world_size: Some(1), ..world(0, 2, "hosts") };
    let text = rendezvous(vec![hosts], None, TIMEOUT).remove(0).unwrap_err();
    assert!(text.starts_with("--rendezvous: expected an address, because the 2 ranks are on several hosts"), "{text}");
}

/// Answers every connection until this process ends.
fn serve(listener: TcpListener, answer: impl Fn(TcpStream) + Send + 'static) {
    thread::spawn(move || listener.incoming().flatten().for_each(answer));
}

/// Returns the error of rank 1, and the time until it, when another server answers in place of rank 0.
fn error_with_other_server(timeout: Duration, answer: impl Fn(TcpStream) + Send + 'static) -> (String, Duration) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = Endpoint::Tcp(listener.local_addr().unwrap().to_string());
    serve(listener, answer);
    let start = Instant::now();
    let text = rendezvous(vec![world(1, 2, "other")], Some(&endpoint), timeout).remove(0).unwrap_err();
    assert!(text.starts_with("rank 1 of 2: expected rank 0 at tcp://127.0.0.1:"), "{text}");
    let end = "see the output of rank 0; if the address belongs to another program, give all ranks another one with \
               --rendezvous tcp://HOST:PORT";
    assert!(text.ends_with(end), "{text}");
    (text, start.elapsed())
}

#[test]
fn another_program_in_place_of_rank_0_is_reported_early() {
    let http = |mut stream: TcpStream| stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap_or_default();
    let short = |mut stream: TcpStream| stream.write_all(b"\x05\0\0\0hello").unwrap_or_default();
    let other = |stream: TcpStream| {
        let _: Result<Hello, _> = receive_json(&stream);
        send_json(&stream, &Reply::OtherRun).unwrap_or_default();
    };
    thread::scope(|scope| {
        let http = scope.spawn(move || error_with_other_server(TIMEOUT, http));
        let short = scope.spawn(move || error_with_other_server(TIMEOUT, short));
        let other = scope.spawn(move || error_with_other_server(TIMEOUT, other));
        for (found, expected) in [
            (http, "(another program listens at 127.0.0.1:PORT and sent \"HTTP\")"),
            (short, "(another program listens at 127.0.0.1:PORT and sent \"hello\")"),
            (other, "(127.0.0.1:PORT is rank 0 of another run)"),
        ] {
            let (text, after) = found.join().unwrap();
            let (before_port, after_port) = expected.split_once("PORT").unwrap();
            assert!(text.contains(before_port) && text.contains(after_port), "{text}");
            assert!(text.contains(" within 5 s, ") && after < UNKNOWN_SERVER_TIMEOUT + SHORT, "{after:?}: {text}");
        }
    });
}

/// A proxy may accept connections before rank 0 listens, so this waits for the full timeout.
#[test]
fn a_silent_server_in_place_of_rank_0_is_reported_after_the_timeout() {
    let silent = |stream: TcpStream| std::mem::forget(stream);
    let (text, after) = error_with_other_server(SHORT, silent);
    assert!(text.contains("(the server at 127.0.0.1:") && text.contains(" does not reply)"), "{text}");
    assert!(after < 3 * SHORT, "{after:?}");
    let (text, after) = error_with_other_server(SHORT, drop);
    assert!(text.contains(" closes the connection without a reply)") && after < 3 * SHORT, "{after:?}: {text}");
}

#[test]
fn ranks_connect_if_their_first_ports_are_in_use() {
    let run = format!("taken {}", std::process::id());
    let ports = ports_of_run(&run);
    let listen = |port| TcpListener::bind(("127.0.0.1", port)).unwrap();
    serve(listen(ports.start), drop);
    serve(listen(ports.start + 1), |mut stream| stream.write_all(b"SSH-2.0-other\r\n").unwrap_or_default());
    let both = rendezvous(vec![world(1, 2, &run), world(0, 2, &run)], None, TIMEOUT);
    assert_eq!(both, [Ok((1, 3.0)), Ok((0, 3.0))]);
    // All ports of the run are in use.
    serve(listen(ports.start + 2), drop);
    serve(listen(ports.start + 3), drop);
    let both = rendezvous(vec![world(0, 2, &run), world(1, 2, &run)], None, SHORT);
    let zero = format!("rank 0: cannot listen on 127.0.0.1:{}: Address already in use", ports.start);
    assert!(both[0].as_ref().unwrap_err().starts_with(&zero), "{both:?}");
    let one = format!("rank 1 of 2: expected rank 0 at 127.0.0.1, ports {} to {}", ports.start, ports.start + 3);
    assert!(both[1].as_ref().unwrap_err().starts_with(&one), "{both:?}");
}

#[test]
fn the_ports_of_every_run_are_in_range() {
    let all: Vec<_> = (0..2000).map(|i| ports_of_run(&i.to_string())).collect();
    assert!(all.iter().all(|ports| ports.len() == 4 && PORTS.contains(&ports.start) && ports.end <= PORTS.end));
    let starts: std::collections::BTreeSet<_> = all.iter().map(|ports| ports.start).collect();
    assert!(starts.len() > 1800);
}

fn secret(text: &str) -> Secret {
    Secret::new(text).unwrap()
}

#[test]
fn only_listeners_of_other_hosts_need_a_secret() {
    let is_local = |address| Listener::bind(address).unwrap().is_local();
    assert_eq!((is_local("127.0.0.1:0"), is_local("0.0.0.0:0")), (true, false));
    let text = open_to_anyone("node1:29400");
    assert!(text.starts_with("warning: ") && text.contains("node1:29400") && text.contains("LLM_RS_SECRET"), "{text}");
}

#[test]
fn ranks_with_one_secret_connect() {
    let dir = tempfile::tempdir().unwrap();
    let file = Endpoint::File(dir.path().to_owned());
    let ours = || Some(secret("the secret of this run"));
    for (i, endpoint) in [Some(free_endpoint()), Some(file), None].iter().enumerate() {
        let job = format!("secret {} {i}", std::process::id());
        let worlds = [2, 0, 1].map(|rank| (world(rank, 3, &job), ours())).to_vec();
        let results = rendezvous_with_secrets(worlds, endpoint.as_ref(), TIMEOUT);
        assert_eq!(results, [2, 0, 1].map(|local_rank| Ok((local_rank, 6.0))), "{endpoint:?}");
    }
}

#[test]
fn ranks_with_different_secrets_do_not_connect() {
    let ours = || Some(secret("the secret of this run"));
    for (zero, one, expected) in [
        (ours(), Some(secret("another run's secret")), "has a different secret from this rank"),
        (ours(), None, "asks for the secret of the run; set LLM_RS_SECRET to the same text on all ranks"),
        (None, ours(), "did not prove that it knows the secret of this rank"),
    ] {
        let worlds = vec![(world(0, 2, "differ"), zero), (world(1, 2, "differ"), one)];
        let all = rendezvous_with_secrets(worlds, Some(&free_endpoint()), SHORT);
        let errors: Vec<String> = all.into_iter().map(Result::unwrap_err).collect();
        assert!(errors[0].contains("missing rank 1") || errors[0].contains("disconnected"), "{errors:?}");
        assert!(errors[1].contains(expected), "{errors:?}");
    }
}

/// Sends a valid introduction of rank 1 of 2, and what `answer` makes of the challenge. Returns the last reply.
fn introduce(address: &str, run: &str, answer: impl FnOnce(Reply) -> Proof) -> Result<Reply, ReceiveError> {
    let stream = TcpStream::connect(address).unwrap();
    let host = Host { name: "stranger".to_owned(), boot: String::new() };
    let (protocol, run, nonce) = (PROTOCOL.to_owned(), run.to_owned(), Nonce::random().unwrap());
    send_json(&stream, &Hello { protocol, run, rank: 1, world_size: 2, host, process: 5, nonce, applicant: None })
        .unwrap();
    let proof = answer(receive_json(&stream)?);
    let _ = send_json(&stream, &proof);
    receive_json(&stream)
}

#[test]
fn a_process_that_knows_only_the_name_of_the_run_cannot_join() {
    let endpoint = free_endpoint();
    let Endpoint::Tcp(address) = &endpoint else { unreachable!() };
    let ours = || Some(secret("the secret of this run"));
    let results = thread::scope(|scope| {
        let zero = scope.spawn(|| {
            rendezvous_with_secrets(vec![(world(0, 2, "named"), ours())], Some(&endpoint), TIMEOUT).remove(0)
        });
        thread::sleep(SHORT);
        // It guesses, repeats the proof of rank 0, or sends none.
        assert!(introduce(address, "named", |_| vec![7; 32]).is_err());
        let repeat = |reply| if let Reply::Challenge { proof, .. } = reply { proof } else { panic!("{reply:?}") };
        assert!(introduce(address, "named", repeat).is_err());
        assert!(introduce(address, "named", |_| Vec::new()).is_err());
        let one = rendezvous_with_secrets(vec![(world(1, 2, "named"), ours())], Some(&endpoint), TIMEOUT).remove(0);
        (zero.join().unwrap(), one)
    });
    assert_eq!(results, (Ok((0, 3.0)), Ok((1, 3.0))));
}

#[test]
fn the_rendezvous_file_holds_a_secret_for_its_owner() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let endpoint = Endpoint::File(dir.path().to_owned());
    let results = thread::scope(|scope| {
        let zero = scope.spawn(|| rendezvous(vec![world(0, 2, "owner")], Some(&endpoint), TIMEOUT).remove(0));
        thread::sleep(SHORT);
        let path = fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let file = RendezvousFile::read(&path).unwrap().unwrap();
        assert!(file.secret.is_some());
        // Its address and the name of the run alone are not enough.
        let address = format!("127.0.0.1:{}", file.port);
        assert!(introduce(&address, &file.run, |_| vec![7; 32]).is_err());
        let one = rendezvous(vec![world(1, 2, "owner")], Some(&endpoint), TIMEOUT).remove(0);
        (zero.join().unwrap(), one)
    });
    assert_eq!(results, (Ok((0, 3.0)), Ok((1, 3.0))));
}

/// Connections that send nothing, or a byte at a time, each occupied rank 0 for three seconds.
#[test]
fn floods_of_slow_connections_do_not_delay_the_ranks() {
    let endpoint = free_endpoint();
    let Endpoint::Tcp(address) = &endpoint else { unreachable!() };
    let ours = || Some(secret("the secret of this run"));
    let results = thread::scope(|scope| {
        let zero = scope.spawn(|| {
            rendezvous_with_secrets(vec![(world(0, 2, "flood"), ours())], Some(&endpoint), TIMEOUT).remove(0)
        });
        thread::sleep(SHORT);
        let mut open = Vec::new();
        for i in 0..2 * 256 {
            let mut stream = TcpStream::connect(address).unwrap();
            // A long message that never ends, junk, or nothing.
            let bytes: &[u8] = [&b"\0\x80\0\0{"[..], b"\xff\xff\xff\xffjunk", b""][i % 3];
            let _ = stream.write_all(bytes);
            open.push(stream);
        }
        let start = Instant::now();
        let one = rendezvous_with_secrets(vec![(world(1, 2, "flood"), ours())], Some(&endpoint), TIMEOUT).remove(0);
        let after = start.elapsed();
        assert!(after < HELLO_TIMEOUT, "{after:?}");
        (zero.join().unwrap(), one)
    });
    assert_eq!(results, (Ok((0, 3.0)), Ok((1, 3.0))));
}
