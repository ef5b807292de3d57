//! The published bundle, a zip archive or its contents, and its installation in a directory.

use super::{BASELINES, Bundle, DATA, TASKS};
use crate::download::Remote;
use crate::local_files::is_hidden;
use anyhow::{Context, Result, bail, ensure};
use flate2::bufread::DeflateDecoder;
use rawzip::{CompressionMethod, ZipArchive, ZipSliceArchive};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

const URL: &str = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip";

/// Maximum size of all files of an archive together.
const MAX_BYTES: u64 = 4 << 30;

/// Returns the address of the bundle that nanochat downloads.
pub fn remote() -> Remote {
    Remote { url: URL.to_owned(), bytes: None, sha256: None }
}

/// Returns the directory of the bundle `from`: an unpacked bundle, the directory above it, or an archive, which is extracted into
/// `extracted`.
pub fn open_source(from: &Path, extracted: &Path) -> Result<PathBuf> {
    let name = from.display();
    if !from.is_dir() {
        let bytes = bounded_file::read(from, bounded_file::TEXT).with_context(|| format!("cannot read {name}"))?;
        extract(&bytes, extracted)
            .with_context(|| format!("{name}: expected a .zip archive with an evaluation bundle"))?;
        return Ok(extracted.to_owned());
    }
    let directories = [from.to_owned(), from.join("eval_bundle")];
    let found = directories.into_iter().find(|directory| directory.join(TASKS).is_file());
    found.with_context(|| format!("{name}: expected {TASKS} in it or in eval_bundle/, found neither"))
}

/// Extracts the files of the bundle in an archive.
fn extract(archive: &[u8], to: &Path) -> Result<()> {
    let archive = ZipArchive::from_slice(archive)?;
    // The bundle is the directory of the list of tasks.
    let mut root = None;
    each_file(&archive, |path, _| {
        if path.file_name() == Some(TASKS.as_ref()) && !is_hidden(path) {
            root.get_or_insert_with(|| atomic_file::parent(path).to_owned());
        }
        Ok(())
    })?;
    let root = root.with_context(|| format!("found no {TASKS} in it"))?;
    let root = root.strip_prefix(".").unwrap_or(&root);
    let mut left = MAX_BYTES;
    each_file(&archive, |path, read| {
        let Ok(path) = path.strip_prefix(root) else { return Ok(()) };
        let is_wanted = [TASKS, BASELINES].iter().any(|name| path == Path::new(name)) || path.starts_with(DATA);
        if is_hidden(path) || !is_wanted {
            return Ok(());
        }
        let to = to.join(path);
        atomic_file::create_directory(atomic_file::parent(&to))?;
        let cannot_write = || format!("cannot write {}", to.display());
        let mut file = File::create_new(&to).with_context(cannot_write)?;
        let copied = read(left, &mut file).with_context(|| path.display().to_string())?;
        left -= copied;
        Ok(())
    })
}

/// Copies at most a number of bytes of a file in an archive, and returns the size of the file.
type ReadFile<'a> = dyn Fn(u64, &mut File) -> Result<u64> + 'a;

/// Calls `each` with the path of each file of an archive.
fn each_file(archive: &ZipSliceArchive<&[u8]>, mut each: impl FnMut(&Path, &ReadFile) -> Result<()>) -> Result<()> {
    let mut entries = archive.entries();
    while let Some(entry) = entries.next_entry()? {
        if entry.is_dir() {
            continue;
        }
        // Without `..`, so that no file is written outside of the directory.
        let path = entry.file_path().try_normalize()?;
        let (method, data) = (entry.compression_method(), entry.wayfinder());
        let read = |most: u64, to: &mut File| {
            let entry = archive.get_entry(data)?;
            let reader: Box<dyn Read> = match method {
                CompressionMethod::STORE => Box::new(entry.data()),
                CompressionMethod::DEFLATE => Box::new(DeflateDecoder::new(entry.data())),
                other => bail!(
                    "expected no compression or deflate, found {other:?}; extract the archive and pass the directory"
                ),
            };
            // Checks size and CRC at its end.
            let mut reader = entry.verifying_reader(reader).take(most.saturating_add(1));
            let copied = io::copy(&mut reader, to)?;
            ensure!(copied <= most, "expected at most {} GiB in the archive, found more", MAX_BYTES >> 30);
            Ok(copied)
        };
        each(Path::new(path.as_ref()), &read)?;
    }
    Ok(())
}

impl Bundle {
    /// Reads all questions, and returns their number.
    pub fn check(&self) -> Result<usize> {
        let counts = self.tasks.iter().map(|task| Ok(task.questions(None)?.len()));
        Ok(counts.collect::<Result<Vec<_>>>()?.into_iter().sum())
    }

    /// Copies the files of the bundle to another directory. The list of tasks is written last, so that an incomplete copy is not a
    /// bundle.
    pub fn install(&self, to: &Path) -> Result<()> {
        let mut files = self.files()?;
        files.sort_by_key(|file| file == Path::new(TASKS));
        for file in files {
            let (from, to) = (self.directory.join(&file), to.join(&file));
            let source = bounded_file::open(&from).with_context(|| format!("cannot read {}", from.display()))?;
            atomic_file::create_directory(atomic_file::parent(&to))?;
            atomic_file::write(&to, |out| Ok(io::copy(&mut BufReader::new(source), out)?))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::DeflateEncoder;
    use rawzip::ZipArchiveWriter;
    use std::fs;
    use std::io::Write;

    const LIST: &str =
        "icl_tasks:\n- {label: a, dataset_uri: x/a.jsonl, num_fewshot: [0], icl_task_type: language_modeling}\n";
    const TABLE: &str = "Eval Task,Random baseline\na,0\n";
    const QUESTIONS: &str = "{\"context\": \"1 + 1 =\", \"continuation\": \"2\"}\n";

    /// Returns an archive of these files, compressed with deflate.
    fn zip(files: &[(&str, &str)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut archive = ZipArchiveWriter::new(&mut bytes);
        for (name, text) in files {
            let file = archive.new_file(name).compression_method(CompressionMethod::DEFLATE);
            let (mut entry, config) = file.start().unwrap();
            let mut writer = config.wrap(DeflateEncoder::new(&mut entry, Compression::default()));
            writer.write_all(text.as_bytes()).unwrap();
            let (encoder, descriptor) = writer.finish().unwrap();
            encoder.finish().unwrap();
            entry.finish(descriptor).unwrap();
        }
        archive.finish().unwrap();
        bytes
    }

    fn open(archive: &[u8]) -> Result<(tempfile::TempDir, Bundle)> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("bundle.zip");
        fs::write(&path, archive).unwrap();
        let found = open_source(&path, &directory.path().join("extracted"))?;
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2, "files outside of the directory");
        let bundle = Bundle::open(&found, None)?;
        Ok((directory, bundle))
    }

    fn files(prefix: &str) -> Vec<(String, &'static str)> {
        let files = [("core.yaml", LIST), ("eval_meta_data.csv", TABLE), ("eval_data/x/a.jsonl", QUESTIONS)];
        let mut files: Vec<_> = files.map(|(name, text)| (format!("{prefix}{name}"), text)).into();
        files.push((format!("{prefix}notes.txt"), "not a part of the bundle"));
        files.push((format!("__MACOSX/{prefix}._core.yaml"), "hidden"));
        files
    }

    fn zip_of(files: &[(String, &str)]) -> Vec<u8> {
        zip(&files.iter().map(|(name, text)| (name.as_str(), *text)).collect::<Vec<_>>())
    }

    #[test]
    fn archives_and_directories_are_installed_without_other_files() {
        for prefix in ["eval_bundle/", "", "a/b/"] {
            let (directory, bundle) = open(&zip_of(&files(prefix))).unwrap();
            assert_eq!(bundle.check().unwrap(), 1);
            let out = directory.path().join("out");
            bundle.install(&out).unwrap();
            let mut names: Vec<_> = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            assert_eq!(names, ["core.yaml", "eval_data", "eval_meta_data.csv"], "{prefix}");
            assert_eq!(fs::read_to_string(out.join("eval_data/x/a.jsonl")).unwrap(), QUESTIONS);
            assert_eq!(open_source(&out, Path::new("unused")).unwrap(), out);
            fs::rename(&out, directory.path().join("eval_bundle")).unwrap();
            assert_eq!(
                open_source(directory.path(), Path::new("unused")).unwrap(),
                directory.path().join("eval_bundle")
            );
        }
    }

    #[test]
    fn damaged_archives_are_errors_that_name_the_archive() {
        let error = |archive: &[u8]| {
            let message = format!("{:#}", open(archive).map(|_| ()).unwrap_err());
            assert!(message.contains("bundle.zip: expected a .zip archive with an evaluation bundle: "), "{message}");
            message
        };
        let whole = zip_of(&files(""));
        error(b"");
        error(&[b'x'; 5000]);
        error(&whole[..whole.len() / 2]);
        assert!(error(&zip(&[("other.txt", "")])).contains("found no core.yaml in it"));
        // The data of the first file, after its header of 30 bytes, its name and no extra fields.
        let mut damaged = whole.clone();
        damaged[30 + "core.yaml".len() + 20] ^= 0x55;
        error(&damaged);
        // The same file twice.
        let twice = [files(""), files("")].concat();
        assert!(error(&zip_of(&twice)).contains("cannot write "));
    }

    #[test]
    fn no_file_leaves_the_directory() {
        let mut evil = files("");
        evil.push(("eval_data/../../../evil.jsonl".to_owned(), "{}"));
        // Either refused or written inside: `open` counts the files beside the directory.
        let _ = open(&zip_of(&evil));
    }
}
