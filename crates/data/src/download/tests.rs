use super::huggingface::files_at;
use super::*;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use tempfile::TempDir;

const BODY: &[u8] = b"0123456789abcdefghij";
/// Independent of this crate: `printf 0123456789abcdefghij | sha256sum`.
const BODY_SHA256: &str = "6bc14bdc4517a7a682c6910de2e2946eb8e1ecd04090728fef6d092a7ceb62c5";

/// Answers the requests of one test: the n-th request gets the n-th response. Returns the address and the `Range` headers of
/// the requests.
fn serve(responses: Vec<Vec<u8>>) -> (String, Receiver<Option<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/data/file.bin", listener.local_addr().unwrap());
    let (ranges, received) = channel();
    thread::spawn(move || {
        for response in responses {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = ranges.send(range_of_request(&stream));
            stream.write_all(&response).unwrap();
        }
    });
    (url, received)
}

fn range_of_request(stream: &TcpStream) -> Option<String> {
    let lines = BufReader::new(stream).lines().map(Result::unwrap).take_while(|line| !line.is_empty());
    let lines: Vec<String> = lines.collect();
    lines.iter().find_map(|line| line.to_lowercase().strip_prefix("range: ").map(str::to_owned))
}

fn response(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    [format!("HTTP/1.1 {status}\r\nConnection: close\r\n{headers}\r\n").as_bytes(), body].concat()
}

fn whole(body: &[u8]) -> Vec<u8> {
    response("200 OK", &format!("Content-Length: {}\r\n", BODY.len()), body)
}

/// The answer to a request for the bytes from `start` on.
fn rest(start: usize) -> Vec<u8> {
    let (n, last) = (BODY.len(), BODY.len() - 1);
    let headers = format!("Content-Length: {}\r\nContent-Range: bytes {start}-{last}/{n}\r\n", n - start);
    response("206 Partial Content", &headers, &BODY[start..])
}

fn remote(url: &str) -> Remote {
    Remote { url: url.to_owned(), bytes: Some(BODY.len() as u64), sha256: Some(BODY_SHA256.to_owned()) }
}

struct Case {
    dir: TempDir,
    to: PathBuf,
    partial: PathBuf,
}

impl Case {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("source/file.bin");
        Self { partial: dir.path().join("source/file.bin.partial"), to, dir }
    }

    fn with_partial(bytes: &[u8]) -> Self {
        let case = Self::new();
        fs::create_dir(case.dir.path().join("source")).unwrap();
        fs::write(&case.partial, bytes).unwrap();
        case
    }

    fn download(&self, remote: &Remote) -> Result<()> {
        with_pause(remote, &self.to, Duration::from_millis(1))
    }

    fn assert_complete(&self) {
        assert_eq!(fs::read(&self.to).unwrap(), BODY);
        assert!(!self.partial.exists());
    }

    fn error(&self, remote: &Remote) -> String {
        let message = format!("{:#}", self.download(remote).unwrap_err());
        assert!(!self.to.exists(), "{message}");
        message
    }
}

#[test]
fn a_file_is_downloaded_once() {
    let case = Case::new();
    let (url, ranges) = serve(vec![whole(BODY)]);
    case.download(&remote(&url)).unwrap();
    case.assert_complete();
    // The server is gone, so a second request would fail.
    case.download(&remote(&url)).unwrap();
    assert_eq!(ranges.iter().collect::<Vec<_>>(), [None]);
}

#[test]
fn an_interrupted_transfer_resumes_at_the_first_missing_byte() {
    let case = Case::new();
    let (url, ranges) = serve(vec![whole(&BODY[..7]), rest(7)]);
    case.download(&remote(&url)).unwrap();
    case.assert_complete();
    assert_eq!(ranges.iter().collect::<Vec<_>>(), [None, Some("bytes=7-".to_owned())]);

    // A later process resumes as well, also without known size and checksum.
    let case = Case::with_partial(&BODY[..5]);
    let (url, ranges) = serve(vec![rest(5)]);
    case.download(&Remote { url, bytes: None, sha256: None }).unwrap();
    case.assert_complete();
    assert_eq!(ranges.iter().collect::<Vec<_>>(), [Some("bytes=5-".to_owned())]);
}

#[test]
fn a_server_without_ranges_sends_the_whole_file() {
    let case = Case::with_partial(b"xxxxx");
    let (url, _) = serve(vec![whole(BODY)]);
    case.download(&remote(&url)).unwrap();
    case.assert_complete();
}

#[test]
fn a_partial_file_that_does_not_fit_is_discarded() {
    let unsatisfiable = |total: &str| {
        response("416 Range Not Satisfiable", &format!("Content-Range: bytes */{total}\r\nContent-Length: 0\r\n"), b"")
    };
    let case = Case::with_partial(&[b'x'; 25]);
    let (url, ranges) = serve(vec![unsatisfiable("20"), whole(BODY)]);
    case.download(&remote(&url)).unwrap();
    case.assert_complete();
    assert_eq!(ranges.iter().collect::<Vec<_>>(), [Some("bytes=25-".to_owned()), None]);
    // A complete partial file needs no request if its size is known, and one otherwise.
    let case = Case::with_partial(BODY);
    case.download(&remote("http://127.0.0.1:1/file.bin")).unwrap();
    case.assert_complete();
    let case = Case::with_partial(BODY);
    let (url, _) = serve(vec![unsatisfiable("20")]);
    case.download(&Remote { url, bytes: None, sha256: None }).unwrap();
    case.assert_complete();
}

#[test]
fn wrong_checksums_and_sizes_are_errors() {
    let case = Case::new();
    let (url, _) = serve(vec![whole(b"0123456789ABCDEFGHIJ")]);
    let message = case.error(&remote(&url));
    assert!(message.contains(&format!("expected SHA-256 {BODY_SHA256}, found ")), "{message}");
    assert!(!case.partial.exists());
    let (url, _) = serve(vec![whole(BODY)]);
    let message = case.error(&Remote { bytes: Some(30), ..remote(&url) });
    assert!(message.contains("expected a file of 30 bytes, found 20 bytes"), "{message}");
    // Without a length in the header, the file is checked after the transfer.
    let (url, _) = serve(vec![response("200 OK", "", &BODY[..9])]);
    let message = case.error(&remote(&url));
    assert!(message.contains("expected 20 bytes, found 9 bytes"), "{message}");
}

#[test]
fn errors_of_the_server_are_reported() {
    let case = Case::new();
    let (url, ranges) = serve(vec![response("404 Not Found", "Content-Length: 4\r\n", b"oops")]);
    let message = case.error(&remote(&url));
    assert!(message.contains("expected status 200 (OK), found 404"), "{message}");
    assert_eq!(ranges.iter().count(), 1);
    assert!(!case.partial.exists());
    // Errors that may be temporary are retried.
    let busy = || response("503 Service Unavailable", "Content-Length: 0\r\n", b"");
    let (url, _) = serve(vec![busy(), busy(), whole(BODY)]);
    case.download(&remote(&url)).unwrap();
    case.assert_complete();
}

/// The next attempt resumes the download.
#[test]
fn a_transfer_that_stalls_fails_after_a_time() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/file.bin", listener.local_addr().unwrap());
    let (end, ended) = channel::<()>();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        range_of_request(&stream);
        stream.write_all(&whole(&BODY[..7])).unwrap();
        // Keeps the connection open until the client gives up.
        let _ = ended.recv_timeout(Duration::from_secs(20));
    });
    let mut file = tempfile::tempfile().unwrap();
    let agent = agent(Duration::from_millis(200));
    let failed = try_fetch(&agent, &remote(&url), &mut file, 0).err().unwrap();
    assert!(!server.is_finished(), "the server ended the connection");
    drop(end);
    server.join().unwrap();
    let Failure::Transient(error) = failed else { panic!("expected another attempt") };
    assert!(format!("{error:#}").contains("the connection failed: timeout"), "{error:#}");
    assert_eq!(file.metadata().unwrap().len(), 7);
}

#[test]
fn a_transfer_that_keeps_failing_ends_with_the_way_to_resume() {
    let case = Case::new();
    let mut responses = vec![whole(&BODY[..7])];
    responses.extend((0..ATTEMPTS).map(|_| response("503 Service Unavailable", "Content-Length: 0\r\n", b"")));
    let (url, _) = serve(responses);
    let message = case.error(&remote(&url));
    assert!(message.contains("7 bytes are kept in ") && message.contains("503"), "{message}");
    assert_eq!(fs::read(&case.partial).unwrap(), &BODY[..7]);
    let (url, _) = serve(vec![rest(7)]);
    case.download(&remote(&url)).unwrap();
    case.assert_complete();
}

#[test]
fn without_a_network_the_error_names_the_address_and_the_flag() {
    let case = Case::new();
    // Nothing listens on this port.
    let url = "http://127.0.0.1:1/data/file.bin";
    let message = format!("{:#}", file(&remote(url), &case.to, "FILE|DIR").unwrap_err());
    assert!(message.contains(url) && message.contains("--from FILE|DIR"), "{message}");
    assert!(!case.partial.exists());
}

#[test]
fn only_one_process_downloads_a_file() {
    let case = Case::with_partial(b"01");
    let other = OpenOptions::new().append(true).open(&case.partial).unwrap();
    other.lock().unwrap();
    let message = case.error(&remote("http://127.0.0.1:1/file.bin"));
    assert!(message.contains("found another process"), "{message}");
}

#[test]
fn hugging_face_files_are_listed_over_several_pages() {
    let json = |body: &str, link: &str| {
        response("200 OK", &format!("Content-Length: {}\r\n{link}", body.len()), body.as_bytes())
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let pages = [
        json(
            r#"[{"type":"directory","path":"sample/10BT/x.parquet","size":0},
                {"type":"file","path":"sample/10BT/b.parquet","size":7,"lfs":{"oid":"abc","size":7}}]"#,
            &format!("Link: <{endpoint}/page2?cursor=1>; rel=\"next\"\r\n"),
        ),
        json(
            r#"[{"type":"file","path":"sample/10BT/a.parquet","size":5},{"type":"file","path":"README.md","size":1}]"#,
            "",
        ),
    ];
    let server = thread::spawn(move || {
        let mut requests = Vec::new();
        for page in pages {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(&stream).lines().map(Result::unwrap);
            requests.push(lines.next().unwrap());
            lines.take_while(|line| !line.is_empty()).for_each(drop);
            stream.write_all(&page).unwrap();
        }
        requests
    });
    let files = files_at(&endpoint, "owner/set", "sample/10BT", ".parquet").unwrap();
    let url = |name| format!("{endpoint}/datasets/owner/set/resolve/main/sample/10BT/{name}");
    assert_eq!(
        files,
        [
            Remote { url: url("a.parquet"), bytes: Some(5), sha256: None },
            Remote { url: url("b.parquet"), bytes: Some(7), sha256: Some("abc".into()) }
        ]
    );
    assert_eq!(
        server.join().unwrap(),
        ["GET /api/datasets/owner/set/tree/main/sample/10BT HTTP/1.1", "GET /page2?cursor=1 HTTP/1.1"]
    );
    let message = format!("{:#}", files_at("http://127.0.0.1:1", "owner/set", "", ".parquet").unwrap_err());
    assert!(message.contains("http://127.0.0.1:1/api/datasets/owner/set/tree/main;"), "{message}");
}
