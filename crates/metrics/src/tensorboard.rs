//! TensorBoard event files.
//!
//! A file is a sequence of records: the length of the data as u64, its checksum, the data, and the checksum of the data, all in
//! little-endian order. The checksum is a CRC32C, rotated and offset. The data is an `Event` of TensorFlow's `event.proto`. The
//! five messages that a scalar needs are encoded here, because the crates for this format are no longer maintained.

use crate::run::RunLog;
use anyhow::Result;
use std::fs;
use std::io::Write;
use std::process;

/// Tag of the training loss.
pub const TRAIN_LOSS: &str = "train/loss";
/// Tag of the learning rate.
pub const LEARNING_RATE: &str = "train/learning_rate";
/// Tag of the gradient norm.
pub const GRADIENT_NORM: &str = "train/gradient_norm";
/// Tag of the throughput.
pub const TOKENS_PER_SECOND: &str = "train/tokens_per_second";
/// Tag of the model FLOPs utilization.
pub const MFU: &str = "train/mfu";
/// Tag of the largest load of an expert divided by the mean load, the mean over the layers.
pub const EXPERT_LOAD: &str = "train/expert_load";
/// Tag of the same in the worst layer.
pub const WORST_EXPERT_LOAD: &str = "train/worst_expert_load";
/// Tag of the number of experts without a token in all layers.
pub const UNUSED_EXPERTS: &str = "train/unused_experts";
/// Tag of the validation loss.
pub const VAL_LOSS: &str = "eval/loss";
/// Tag of the HellaSwag accuracy.
pub const HELLASWAG: &str = "eval/hellaswag";
/// Tag of CORE.
pub const CORE: &str = "eval/core";

/// A part of the names of event files, by which TensorBoard finds them.
pub const MARKER: &str = ".tfevents.";

/// Returns the name of an event file that a process creates at a Unix time in seconds. TensorBoard reads the files of a directory
/// in the order of their names.
pub fn file_name(time: f64) -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host: String = host.trim().chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
    let host = if host.is_empty() { "localhost" } else { &host };
    format!("events.out{MARKER}{:010}.{host}.{}.0", time.max(0.0) as u64, process::id())
}

/// Returns the records at the start of a file whose first step is `step`.
///
/// TensorBoard discards what earlier files of the directory contain from this step on: the run has been resumed there.
pub fn start(time: f64, step: u64) -> Vec<u8> {
    let mut version = event(time, None);
    bytes(&mut version, 3, b"brain.Event:2");
    let mut records = record(&version);
    if step > 0 {
        const STATUS_START: u64 = 1;
        let mut session = Vec::new();
        integer(&mut session, 1, STATUS_START);
        let mut restart = event(time, Some(step));
        bytes(&mut restart, 7, &session);
        records.extend(record(&restart));
    }
    records
}

/// Returns the record of some values of one step. A value that is not finite is valid.
pub fn scalars(time: f64, step: u64, values: &[(&str, f32)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, value) in values {
        let mut scalar = Vec::new();
        bytes(&mut scalar, 1, tag.as_bytes());
        key(&mut scalar, 2, WireType::Fixed32);
        scalar.extend(value.to_le_bytes());
        bytes(&mut summary, 1, &scalar);
    }
    let mut event = event(time, Some(step));
    bytes(&mut event, 5, &summary);
    record(&event)
}

/// Writes an event file with the log of a run. `time` is the Unix time of records whose time is unknown.
pub fn write(run: &RunLog, time: f64, mut to: impl Write) -> Result<()> {
    let known = |recorded: f64| if recorded.is_finite() { recorded } else { time };
    let times = run.steps.iter().map(|step| step.time).chain(run.validations.iter().map(|evaluation| evaluation.time));
    let first = times.filter(|time| time.is_finite()).fold(f64::INFINITY, f64::min);
    to.write_all(&start(known(first), 0))?;
    for step in &run.steps {
        let others = [
            (LEARNING_RATE, step.lr),
            (GRADIENT_NORM, step.norm),
            (TOKENS_PER_SECOND, step.tokens_per_second),
            (MFU, step.mfu),
            (EXPERT_LOAD, step.expert_load[0]),
            (WORST_EXPERT_LOAD, step.expert_load[1]),
            (UNUSED_EXPERTS, step.unused_experts),
        ];
        let mut values = vec![(TRAIN_LOSS, step.loss)];
        values.extend(others.into_iter().filter(|(_, value)| value.is_finite()));
        to.write_all(&scalars(known(step.time), step.step, &values))?;
    }
    for (tag, evaluations) in [(VAL_LOSS, &run.validations), (HELLASWAG, &run.hellaswag), (CORE, &run.core)] {
        for evaluation in evaluations {
            to.write_all(&scalars(known(evaluation.time), evaluation.step, &[(tag, evaluation.value as f32)]))?;
        }
    }
    Ok(to.flush()?)
}

/// Returns the checksum that the records contain: a CRC32C, rotated by 15 bits and offset, so that the checksum of data which
/// contains checksums is no weaker.
pub fn masked_crc32c(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let checksums = [&length[..], data].map(|part| masked_crc32c(part).to_le_bytes());
    [&length[..], &checksums[0], data, &checksums[1]].concat()
}

/// Returns the fields that all events have.
fn event(time: f64, step: Option<u64>) -> Vec<u8> {
    let mut event = Vec::new();
    key(&mut event, 1, WireType::Fixed64);
    event.extend(time.to_le_bytes());
    if let Some(step) = step {
        integer(&mut event, 2, step);
    }
    event
}

/// The encodings of values in protocol buffers.
#[derive(Clone, Copy)]
enum WireType {
    Varint = 0,
    Fixed64 = 1,
    Bytes = 2,
    Fixed32 = 5,
}

fn varint(to: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        to.push(value as u8 | 0x80);
        value >>= 7;
    }
    to.push(value as u8);
}

fn key(to: &mut Vec<u8>, field: u64, wire_type: WireType) {
    varint(to, field << 3 | wire_type as u64);
}

fn integer(to: &mut Vec<u8>, field: u64, value: u64) {
    key(to, field, WireType::Varint);
    varint(to, value);
}

fn bytes(to: &mut Vec<u8>, field: u64, value: &[u8]) {
    key(to, field, WireType::Bytes);
    varint(to, value.len() as u64);
    to.extend(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the data of each record of a file, and checks lengths and checksums.
    fn records(mut file: &[u8]) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        while !file.is_empty() {
            let (header, rest) = file.split_at(12);
            let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
            let length = u64::from_le_bytes(header[..8].try_into().unwrap()) as usize;
            assert_eq!(word(&header[8..]), masked_crc32c(&header[..8]));
            let (data, rest) = rest.split_at(length);
            assert_eq!(word(&rest[..4]), masked_crc32c(data));
            found.push(data.to_vec());
            file = &rest[4..];
        }
        found
    }

    #[test]
    fn checksums_are_masked_crc32c() {
        // RFC 3720, B.4: the CRC32C of 32 zeros and of the bytes 0 to 31.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c::crc32c(&ascending), 0x46dd_794e);
        // ((crc >> 15) | (crc << 17)) + 0xa282ead8, by hand.
        assert_eq!(masked_crc32c(&ascending), 0x951f_7892);
        // The header of the version record of every event file, whose data has 24 bytes, as TensorFlow writes it.
        assert_eq!(start(0.0, 0)[..12], [0x18, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22]);
    }

    #[test]
    fn records_have_the_fields_of_event_proto() {
        let file = [start(1.5, 300), scalars(2.0, 300, &[("a", 0.5), ("bc", f32::NAN)])].concat();
        let records = records(&file);
        assert_eq!(records[0], [&b"\x09"[..], &1.5_f64.to_le_bytes(), b"\x1a\x0dbrain.Event:2"].concat());
        // Step 300 is the varint ac 02.
        assert_eq!(records[1], [&b"\x09"[..], &1.5_f64.to_le_bytes(), b"\x10\xac\x02\x3a\x02\x08\x01"].concat());
        let (a, bc) = (
            [&b"\x0a\x01a\x15"[..], &0.5_f32.to_le_bytes()].concat(),
            [&b"\x0a\x02bc\x15"[..], &f32::NAN.to_le_bytes()].concat(),
        );
        let summary = [&[0x0a, a.len() as u8][..], &a, &[0x0a, bc.len() as u8], &bc].concat();
        let event =
            [&b"\x09"[..], &2.0_f64.to_le_bytes(), b"\x10\xac\x02\x2a", &[summary.len() as u8], &summary].concat();
        assert_eq!(records[2], event);
        assert_eq!(records.len(), 3);
    }

    #[test]
    fn a_log_becomes_one_record_for_each_line() {
        let log = RunLog::parse(
            "s:0 tel:5\ns:0 trl:4.5 lr:0.1 norm:1\ns:1 trl:nan\ns:1 eval:0.25\ns:1 core:0.1\n".as_bytes(),
        )
        .unwrap();
        let mut file = Vec::new();
        write(&log, 7.0, &mut file).unwrap();
        let records = records(&file);
        assert_eq!(records.len(), 6);
        let contains = |record: &[u8], text: &str| record.windows(text.len()).any(|window| window == text.as_bytes());
        assert!([TRAIN_LOSS, LEARNING_RATE, GRADIENT_NORM].iter().all(|tag| contains(&records[1], tag)));
        assert!(contains(&records[2], TRAIN_LOSS) && !contains(&records[2], LEARNING_RATE));
        assert!(contains(&records[3], VAL_LOSS) && contains(&records[4], HELLASWAG) && contains(&records[5], CORE));
        assert!(records.iter().all(|record| record[1..9] == 7.0_f64.to_le_bytes()));
        assert!(file_name(12.9).starts_with("events.out.tfevents.0000000012."));
    }
}
