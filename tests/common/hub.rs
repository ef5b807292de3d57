//! A local server in place of the Hugging Face Hub, and files of ClimbMix for it.

use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::json;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// A request for a file: its name and the first byte of the range.
pub type Request = (String, Option<usize>);

/// A server with the interface of the Hugging Face Hub and some files of ClimbMix. It lives until the test process ends.
pub struct Hub {
    pub address: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

/// The defect of a file on the server.
#[derive(Clone, Copy)]
pub enum Defect {
    None,
    /// A connection that asks for the whole file ends in the middle.
    Interrupted(&'static str),
    /// The list contains the file, but the server does not have it.
    Missing(&'static str),
    /// The file is shorter than the list states.
    Truncated(&'static str),
}

impl Hub {
    pub fn new(files: Vec<(&'static str, Vec<u8>)>, defect: Defect) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let recorded = Arc::clone(&requests);
        thread::spawn(move || {
            for stream in listener.incoming() {
                answer(&stream.unwrap(), &files, defect, &recorded);
            }
        });
        Self { address, requests }
    }

    /// Returns the requests for files since the last call.
    pub fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.requests.lock().unwrap())
    }
}

/// Answers a request, and records it if it is one for a file.
fn answer(mut stream: &TcpStream, files: &[(&str, Vec<u8>)], defect: Defect, requests: &Mutex<Vec<Request>>) {
    let lines = BufReader::new(stream).lines().map(Result::unwrap).take_while(|line| !line.is_empty());
    let lines: Vec<String> = lines.collect();
    let path = lines[0].split(' ').nth(1).unwrap().to_owned();
    let range = lines.iter().find_map(|line| {
        line.to_lowercase().strip_prefix("range: bytes=").map(|range| range.trim_end_matches('-').parse().unwrap())
    });
    let mut respond = |status: &str, range: &str, length: usize, body: &[u8]| {
        let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{range}\r\n");
        stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
    };
    let data_set = "datasets/karpathy/climbmix-400b-shuffle";
    if path == format!("/api/{data_set}/tree/main") {
        let entry = |(name, bytes): &(&str, Vec<u8>)| json!({ "type": "file", "path": name, "size": bytes.len() });
        let list = serde_json::to_vec(&files.iter().map(entry).collect::<Vec<_>>()).unwrap();
        respond("200 OK", "", list.len(), &list);
        return;
    }
    let name = path.strip_prefix(&format!("/{data_set}/resolve/main/")).unwrap();
    requests.lock().unwrap().push((name.to_owned(), range));
    let (_, bytes) = files.iter().find(|(file, _)| *file == name).unwrap();
    match (defect, range) {
        (Defect::Missing(file), _) if file == name => respond("404 Not Found", "", 0, &[]),
        (Defect::Truncated(file), _) if file == name => respond("200 OK", "", bytes.len() - 9, &bytes[9..]),
        (Defect::Interrupted(file), None) if file == name => {
            respond("200 OK", "", bytes.len(), &bytes[..bytes.len() / 2]);
        }
        (_, None) => respond("200 OK", "", bytes.len(), bytes),
        (_, Some(start)) => {
            let range = format!("Content-Range: bytes {start}-{}/{}\r\n", bytes.len() - 1, bytes.len());
            respond("206 Partial Content", &range, bytes.len() - start, &bytes[start..]);
        }
    }
}

/// Returns a parquet file with a column `text`.
pub fn pages(texts: &[impl AsRef<str>]) -> Vec<u8> {
    let schema = Arc::new(parse_message_type("message m { required binary text (UTF8); }").unwrap());
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, schema, Arc::new(WriterProperties::default())).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let values: Vec<ByteArray> = texts.iter().map(|text| ByteArray::from(text.as_ref())).collect();
    column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    bytes
}
