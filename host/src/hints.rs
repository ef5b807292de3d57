//! Suggested commands, spelled the way the user called the program and quoted for a shell.

use data::documents;
use std::env;
use std::path::{Path, PathBuf};

/// How this process was called.
pub struct Invocation {
    program: String,
    arguments: Vec<String>,
}

impl Invocation {
    /// Returns the invocation of this process.
    pub fn current() -> Self {
        let mut arguments = env::args_os().map(|argument| argument.to_string_lossy().into_owned());
        let typed = arguments.next().unwrap_or_else(|| "llm-rs".to_owned());
        // `cargo run` sets these variables for the program that it starts.
        let by_cargo = env::var_os("CARGO").is_some()
            && env::var("CARGO_PKG_NAME").is_ok_and(|package| package == env!("CARGO_PKG_NAME"));
        Self::new(&typed, by_cargo, arguments.collect())
    }

    fn new(typed: &str, by_cargo: bool, arguments: Vec<String>) -> Self {
        let program = match by_cargo {
            true if cfg!(debug_assertions) => "cargo run -p host --".to_owned(),
            true => "cargo run --release -p host --".to_owned(),
            false => quote(typed),
        };
        Self { program, arguments }
    }

    /// Returns a command of this program with the given arguments.
    pub fn command<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> String {
        arguments.into_iter().fold(self.program.clone(), |command, argument| command + " " + &quote(argument))
    }

    /// Returns this command with `--resume` and the directory `out`, whatever it said about both. Without a checkpoint, the run starts from
    /// the beginning.
    pub fn resuming(&self, out: &Path, has_checkpoint: bool) -> String {
        let is_value = |text: &str| crate::values::resume(text).is_ok();
        let out = out.to_string_lossy();
        let (mut kept, mut is_named) = (Vec::new(), false);
        let mut arguments = self.arguments.iter().map(String::as_str).peekable();
        while let Some(argument) = arguments.next() {
            let attached = argument.strip_prefix("--out=").or_else(|| argument.strip_prefix("-o"));
            let attached =
                attached.map(|value| value.strip_prefix('=').unwrap_or(value)).filter(|value| !value.is_empty());
            if argument == "--resume" || argument == "-y" {
                arguments.next_if(|value| is_value(value));
            } else if argument == "--out" || argument == "-o" {
                is_named = arguments.next() == Some(&*out);
                kept.extend(is_named.then_some([argument, &*out]).into_iter().flatten());
            } else if let Some(value) = attached {
                is_named = value == out;
                kept.extend(is_named.then_some(argument));
            } else if !argument.starts_with("--resume=") && !argument.strip_prefix("-y").is_some_and(is_value) {
                kept.push(argument);
            }
        }
        if !is_named {
            kept.extend(["--out", &*out]);
        }
        kept.extend(if has_checkpoint { &["--resume"][..] } else { &["--resume", "auto"] });
        self.command(kept)
    }

    /// Returns this command without the flags `removed`, and with the arguments `added` at its end.
    pub fn repeated(&self, removed: &[&str], added: &[&str]) -> String {
        let kept = self.arguments.iter().map(String::as_str).filter(|argument| !removed.contains(argument));
        self.command(kept.chain(added.iter().copied()))
    }
}

/// Returns the command that tokenizes the files which match a glob pattern, or those in a directory. Returns `None` if there are
/// token files or no text.
pub fn tokenize(pattern: &str) -> Option<String> {
    let found = documents::find(&[PathBuf::from(pattern)], &[], None).ok()?;
    if found.files.iter().any(|file| file.extension().is_some_and(|extension| extension == "bin")) {
        return None;
    }
    // A pipe or a device may have nothing to read.
    let field = documents::text_field(found.files.first().filter(|file| file.is_file())?)?;
    let mut command = vec!["data", "text", pattern];
    if field != "text" {
        command.extend(["--field", &field]);
    }
    let out = unused_directory(pattern);
    command.extend(["--out", out.to_str()?]);
    Some(Invocation::current().command(command))
}

/// Returns a directory in `data` that does not exist, named after a file, a directory, or the directory of a pattern.
fn unused_directory(pattern: &str) -> PathBuf {
    let is_pattern = |name: &str| name.contains(['*', '?', '[']);
    let names = Path::new(pattern).components().rev().filter_map(|part| part.as_os_str().to_str());
    let stem = |name: &str| name.trim_start_matches('.').split('.').next().unwrap_or_default().to_owned();
    let name = names.filter(|name| !is_pattern(name)).map(stem).find(|name| !name.is_empty() && name != "/");
    let name = name.unwrap_or_else(|| "text".to_owned());
    let numbered = |number: usize| match number {
        1 => Path::new("data").join(&name),
        _ => Path::new("data").join(format!("{name}-{number}")),
    };
    (1..1000).map(numbered).find(|path| !path.exists()).unwrap_or_default()
}

/// Quotes an argument for a POSIX shell.
fn quote(argument: &str) -> String {
    shlex::Quoter::new().allow_nul(true).quote(argument).map_or_else(|_| argument.to_owned(), Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn commands_repeat_the_program_as_typed_and_quote_arguments() {
        let typed = Invocation::new("./my programs/llm-rs", false, arguments("train --dry-run --train a*.bin"));
        assert_eq!(typed.command(["sample", "--prompt", "it's"]), r#"'./my programs/llm-rs' sample --prompt "it's""#);
        let repeated = typed.repeated(&["--dry-run"], &["--out", "run 1"]);
        assert_eq!(repeated, "'./my programs/llm-rs' train --train 'a*.bin' --out 'run 1'");
    }

    #[test]
    fn every_spelling_of_resume_is_replaced() {
        for flags in ["", " --resume", " --resume=auto", " --resume auto", " -y 1", " -y1", " -y", " --resume=0"] {
            let typed = Invocation::new("llm-rs", false, arguments(&format!("train{flags} --out run -x 7")));
            assert_eq!(typed.resuming(Path::new("run"), true), "llm-rs train --out run -x 7 --resume", "{flags}");
        }
    }

    #[test]
    fn a_command_that_resumes_names_the_directory_of_the_run() {
        for (flags, resumed) in [
            ("--out run", "--out run"),
            ("-o run", "-o run"),
            ("--out=run", "'--out=run'"),
            ("-orun", "-orun"),
            ("-o=run", "'-o=run'"),
            // The directory was moved.
            ("--out a --lr 1", "--lr 1 --out run"),
            ("-oa", "--out run"),
            ("--lr 1", "--lr 1 --out run"),
            ("--config c.toml", "--config c.toml --out run"),
        ] {
            let typed = Invocation::new("llm-rs", false, arguments(&format!("train {flags}")));
            assert_eq!(typed.resuming(Path::new("run"), true), format!("llm-rs train {resumed} --resume"));
            assert_eq!(typed.resuming(Path::new("run"), false), format!("llm-rs train {resumed} --resume auto"));
        }
    }

    #[test]
    fn commands_run_through_cargo_repeat_cargo() {
        let command = Invocation::new("target/release/llm-rs", true, Vec::new()).command(["train"]);
        let profile = if cfg!(debug_assertions) { "" } else { " --release" };
        assert_eq!(command, format!("cargo run{profile} -p host -- train"));
    }
}
