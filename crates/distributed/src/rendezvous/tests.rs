//! Ranks that meet, are refused, or find somebody else.

use super::join::STRANGERS;
use super::*;
use std::thread;

const TIMEOUT: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(400);

fn world(rank: usize, ranks: usize, job: &str) -> World {
    World { rank, ranks, local_rank: None, local_ranks: None, job: Some(job.to_owned()) }
}

/// What becomes of processes that are threads here: local rank and a sum over all, or what is said.
fn met(worlds: Vec<World>, place: Option<&Place>, timeout: Duration) -> Vec<Result<(usize, f64), String>> {
    let meet = move |world: World| {
        let mut met = meet(&world, place, timeout, TIMEOUT).map_err(|error| format!("{error:#}"))?;
        let mut sum = [1.0 + world.rank as f64];
        met.star.sum(&mut sum).map_err(|error| error.to_string())?;
        met.star.end();
        Ok((met.local_rank, sum[0]))
    };
    thread::scope(|scope| {
        let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(move || meet(world))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A port that is free just now.
fn tcp() -> Place {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    Place::Tcp(format!("127.0.0.1:{port}"))
}

#[test]
fn places_are_parsed_or_refused_with_what_was_expected() {
    assert_eq!("tcp://node1:29400".parse(), Ok(Place::Tcp("node1:29400".to_owned())));
    assert_eq!("tcp://[::1]:5".parse(), Ok(Place::Tcp("[::1]:5".to_owned())));
    assert_eq!("file:///shared/a".parse(), Ok(Place::File("/shared/a".into())));
    for wrong in ["tcp://node1", "tcp://:1", "tcp://a:0", "tcp://a:66000", "file://here", "node:1", ""] {
        assert!(wrong.parse::<Place>().unwrap_err().contains("expected tcp://HOST:PORT"), "{wrong}");
    }
}

#[test]
fn ranks_meet_in_every_place() {
    let dir = tempfile::tempdir().unwrap();
    let file = Place::File(dir.path().to_owned());
    for (i, place) in [Some(tcp()), Some(file), None].iter().enumerate() {
        // Not in the order of their ranks.
        let worlds = [2, 0, 3, 1].map(|rank| world(rank, 4, &format!("test {} {i}", std::process::id()))).to_vec();
        let met = met(worlds, place.as_ref(), TIMEOUT);
        assert_eq!(met, [2, 0, 3, 1].map(|local_rank| Ok((local_rank, 10.0))), "{place:?}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "the notice is gone");
}

#[test]
fn what_the_launcher_says_of_local_ranks_counts() {
    let worlds = vec![world(0, 2, "local"), World { local_rank: Some(5), ..world(1, 2, "local") }];
    assert_eq!(met(worlds, Some(&tcp()), TIMEOUT), [Ok((0, 3.0)), Ok((5, 3.0))]);
}

#[test]
fn ranks_that_never_come_are_named_on_all() {
    let all = met(vec![world(0, 5, "few"), world(1, 5, "few"), world(3, 5, "few")], Some(&tcp()), SHORT);
    let text = "ranks 2, 4 of 5 never came: after 0 s only 3 are here (ranks 0, 1, 3); look for what they said, check that \
                all are started and reach rank 0, or allow more time with --rendezvous-timeout";
    assert_eq!(all, [Err(text.to_owned()), Err(text.to_owned()), Err(text.to_owned())]);
    let alone = met(vec![world(0, 2, "few")], Some(&tcp()), SHORT).remove(0).unwrap_err();
    assert!(
        alone.starts_with("rank 1 of 2 never came: after 0 s only 1 is here (rank 0); look for what it said"),
        "{alone}"
    );
}

/// What ranks 0 and 2 of 4 hear when rank 1 greets so, and ends while rank 3 is waited for.
fn after_a_guest(greeting: &str) -> Vec<Result<(usize, f64), String>> {
    let place = tcp();
    let Place::Tcp(address) = &place else { unreachable!() };
    thread::scope(|scope| {
        let waiting = scope.spawn(|| met(vec![world(0, 4, "ends"), world(2, 4, "ends")], Some(&place), TIMEOUT));
        thread::sleep(SHORT);
        let stream = TcpStream::connect(address).unwrap();
        let host = Host { name: "node7".to_owned(), boot: String::new() };
        let (greeting, run) = (greeting.to_owned(), "ends".to_owned());
        say(&stream, &Hello { greeting, run, rank: 1, ranks: 4, host, process: 5 }).unwrap();
        assert!(matches!(hear(&stream).unwrap(), Answer::Wait));
        drop(stream);
        waiting.join().unwrap()
    })
}

#[test]
fn a_rank_that_ends_while_others_are_waited_for_is_named_on_all() {
    let text = "rank 1 (node7, process 5) has ended, or the connection to it; the ranks were meeting";
    assert_eq!(after_a_guest(GREETING), [Err(text.to_owned()), Err(text.to_owned())]);
}

#[test]
fn a_rank_of_another_version_is_named_on_all() {
    let text = "rank 1 (node7, process 5) runs another version of the program than rank 0: install one on all hosts";
    assert_eq!(after_a_guest("llm.rs ranks 1"), [Err(text.to_owned()), Err(text.to_owned())]);
}

#[test]
fn rank_0_that_never_comes_is_told_by_each() {
    for (place, why) in [(tcp(), "Connection refused"), (Place::File("/tmp".into()), "nothing to be found there")] {
        let text = met(vec![world(1, 2, "no rank 0")], Some(&place), SHORT).remove(0).unwrap_err();
        assert!(text.starts_with("rank 1 of 2 did not find rank 0 at ") && text.contains(why), "{text}");
    }
}

#[test]
fn two_processes_of_one_rank_and_other_world_sizes_are_refused() {
    let all = met(vec![world(0, 3, "twice"), world(1, 3, "twice"), world(1, 3, "twice")], Some(&tcp()), TIMEOUT);
    let text = all[0].clone().unwrap_err();
    assert!(
        text.starts_with("two processes say that they are rank 1: rank 1 (") && all == vec![Err(text); 3],
        "{all:?}"
    );
    let all = met(vec![world(0, 2, "size"), world(1, 3, "size")], Some(&tcp()), TIMEOUT);
    let text = all[0].clone().unwrap_err();
    assert!(text.contains("says there are 3 ranks, rank 0 says 2") && all[1] == Err(text), "{all:?}");
}

#[test]
fn runs_do_not_mix() {
    let place = tcp();
    let all = met(vec![world(0, 2, "mine"), world(1, 2, "yours")], Some(&place), SHORT);
    assert!(all[0].as_ref().unwrap_err().starts_with("rank 1 of 2 never came"), "{all:?}");
    assert!(all[1].as_ref().unwrap_err().contains("is rank 0 of another run"), "{all:?}");
    // Two runs in one directory.
    let dir = tempfile::tempdir().unwrap();
    let file = Place::File(dir.path().to_owned());
    let worlds = [(0, "a"), (0, "b"), (1, "b"), (1, "a")].map(|(rank, job)| world(rank, 2, job)).to_vec();
    assert!(met(worlds, Some(&file), TIMEOUT).iter().all(Result::is_ok));
}

#[test]
fn a_notice_of_an_earlier_run_leads_to_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(format!("rendezvous-{:016x}.json", xxh3_64(b"again")));
    // Its port has another owner by now, who is of another run, or says nothing.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let stale = Notice::new("again 1 2".to_owned(), other.local_addr().unwrap().port());
    fs::write(&path, serde_json::to_vec(&stale).unwrap()).unwrap();
    let place = Place::File(dir.path().to_owned());
    let met = thread::scope(|scope| {
        scope.spawn(|| {
            let (stream, _) = other.accept().unwrap();
            let hello: Hello = hear(&stream).unwrap();
            assert_eq!(hello.run, "again 1 2");
            say(&stream, &Answer::OtherRun).unwrap();
        });
        let late = scope.spawn(|| met(vec![world(1, 2, "again")], Some(&place), TIMEOUT).remove(0));
        thread::sleep(SHORT);
        let first = met(vec![world(0, 2, "again")], Some(&place), TIMEOUT).remove(0);
        (first, late.join().unwrap())
    });
    assert_eq!(met, (Ok((0, 3.0)), Ok((1, 3.0))));
}

#[test]
fn strangers_at_the_port_are_ignored() {
    let place = tcp();
    let Place::Tcp(address) = &place else { unreachable!() };
    let met = thread::scope(|scope| {
        let zero = scope.spawn(|| met(vec![world(0, 2, "strangers")], Some(&place), TIMEOUT).remove(0));
        let knock = || {
            (0..200)
                .find_map(|_| {
                    thread::sleep(PAUSE / 10);
                    TcpStream::connect(address).ok()
                })
                .unwrap()
        };
        knock().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        drop(knock());
        let one = met(vec![world(1, 2, "strangers")], Some(&place), TIMEOUT).remove(0);
        (zero.join().unwrap(), one)
    });
    assert_eq!(met, (Ok((0, 3.0)), Ok((1, 3.0))));
}

#[test]
fn a_place_where_rank_0_cannot_listen_is_named_with_what_to_do() {
    let zero = |place: &Place| met(vec![world(0, 2, "port")], Some(place), SHORT).remove(0).unwrap_err();
    let used = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = used.local_addr().unwrap();
    assert_eq!(
        zero(&Place::Tcp(address.to_string())),
        format!(
            "rank 0 cannot listen at {address}: Address already in use (os error 98); another process listens there, which \
             `ss -ltnp` may name: end it, or give all ranks another port, --rendezvous tcp://HOST:PORT"
        )
    );
    let text = zero(&Place::Tcp("no.such.host.invalid:5000".to_owned()));
    assert!(
        text.starts_with("rank 0 cannot listen at no.such.host.invalid:5000: ")
            && text.contains("; expected an address or a name of rank 0's host: give all ranks another, --rendezvous"),
        "{text}"
    );
    // An address of another host, or one that is translated on the way here.
    let Place::Tcp(free) = tcp() else { unreachable!() };
    let elsewhere = free.replace("127.0.0.1", "192.0.2.1");
    let text = zero(&Place::Tcp(elsewhere));
    let here = Host::here().name;
    assert!(
        text.starts_with("rank 1 of 2 never came")
            && text.contains(&format!(" reach rank 0 (192.0.2.1 is no address of its host, {here}), or allow ")),
        "{text}"
    );
    let hosts = World { local_ranks: Some(1), ..world(0, 2, "hosts") };
    let text = met(vec![hosts], None, TIMEOUT).remove(0).unwrap_err();
    assert!(text.starts_with("the 2 ranks are on several hosts: give --rendezvous tcp://HOST:PORT"), "{text}");
}

/// Answers everybody who connects, as long as this process lives.
fn answers(listener: TcpListener, answer: impl Fn(TcpStream) + Send + 'static) {
    thread::spawn(move || listener.incoming().flatten().for_each(answer));
}

/// What rank 1 says, and after how long, of a place where somebody gives this answer.
fn in_place_of_rank_0(timeout: Duration, answer: impl Fn(TcpStream) + Send + 'static) -> (String, Duration) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = Place::Tcp(listener.local_addr().unwrap().to_string());
    answers(listener, answer);
    let began = Instant::now();
    let text = met(vec![world(1, 2, "stranger")], Some(&place), timeout).remove(0).unwrap_err();
    assert!(text.starts_with("rank 1 of 2 did not find rank 0 at tcp://127.0.0.1:"), "{text}");
    let end = "look for what rank 0 said, and if that place is not its own, give all ranks another, --rendezvous \
               tcp://HOST:PORT";
    assert!(text.ends_with(end), "{text}");
    (text, began.elapsed())
}

#[test]
fn another_program_where_rank_0_should_be_is_told_soon() {
    let http = |mut stream: TcpStream| stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap_or_default();
    let short = |mut stream: TcpStream| stream.write_all(b"\x05\0\0\0hello").unwrap_or_default();
    let other = |stream: TcpStream| {
        let _: Result<Hello, _> = hear(&stream);
        say(&stream, &Answer::OtherRun).unwrap_or_default();
    };
    thread::scope(|scope| {
        let http = scope.spawn(move || in_place_of_rank_0(TIMEOUT, http));
        let short = scope.spawn(move || in_place_of_rank_0(TIMEOUT, short));
        let other = scope.spawn(move || in_place_of_rank_0(TIMEOUT, other));
        for (found, why) in [
            (http, "(another program listens at 127.0.0.1:PORT, which says \"HTTP\")"),
            (short, "(another program listens at 127.0.0.1:PORT, which says \"hello\")"),
            (other, "(127.0.0.1:PORT is rank 0 of another run)"),
        ] {
            let (text, after) = found.join().unwrap();
            let (before_port, after_port) = why.split_once("PORT").unwrap();
            assert!(text.contains(before_port) && text.contains(after_port), "{text}");
            assert!(text.contains(" within 5 s ") && after < STRANGERS + SHORT, "{after:?}: {text}");
        }
    });
}

/// It may be what makes connections before rank 0 is there.
#[test]
fn whoever_says_nothing_where_rank_0_should_be_is_told_in_time() {
    let silent = |stream: TcpStream| std::mem::forget(stream);
    let (text, after) = in_place_of_rank_0(SHORT, silent);
    assert!(text.contains("(whoever listens at 127.0.0.1:") && text.contains(" does not answer)"), "{text}");
    assert!(after < 3 * SHORT, "{after:?}");
    let (text, after) = in_place_of_rank_0(SHORT, drop);
    assert!(text.contains(" closes the connection without an answer)") && after < 3 * SHORT, "{after:?}: {text}");
}

/// And so does a run of one host whose first port is taken.
#[test]
fn ranks_meet_although_somebody_else_is_at_their_first_ports() {
    let run = format!("taken {}", std::process::id());
    let ports = ports_of(&run);
    let listen = |port| TcpListener::bind(("127.0.0.1", port)).unwrap();
    answers(listen(ports.start), drop);
    answers(listen(ports.start + 1), |mut stream| stream.write_all(b"SSH-2.0-other\r\n").unwrap_or_default());
    let both = met(vec![world(1, 2, &run), world(0, 2, &run)], None, TIMEOUT);
    assert_eq!(both, [Ok((1, 3.0)), Ok((0, 3.0))]);
    // Where all are, that is told.
    answers(listen(ports.start + 2), drop);
    answers(listen(ports.start + 3), drop);
    let both = met(vec![world(0, 2, &run), world(1, 2, &run)], None, SHORT);
    let zero = format!("rank 0 cannot listen at 127.0.0.1:{}: Address already in use", ports.start);
    assert!(both[0].as_ref().unwrap_err().starts_with(&zero), "{both:?}");
    let one = format!("rank 1 of 2 did not find rank 0 at 127.0.0.1, ports {} to {}", ports.start, ports.start + 3);
    assert!(both[1].as_ref().unwrap_err().starts_with(&one), "{both:?}");
}

#[test]
fn every_run_has_its_ports_in_range() {
    let all: Vec<_> = (0..2000).map(|i| ports_of(&i.to_string())).collect();
    assert!(all.iter().all(|ports| ports.len() == 4 && PORTS.contains(&ports.start) && ports.end <= PORTS.end));
    let starts: std::collections::BTreeSet<_> = all.iter().map(|ports| ports.start).collect();
    assert!(starts.len() > 1800);
}
