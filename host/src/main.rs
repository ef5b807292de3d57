use distributed::fault::Fault;
use std::env;
use std::io::{self, Write, stderr};
use std::process::ExitCode;

fn main() -> ExitCode {
    match host::cli::Cli::of(env::args_os()).and_then(|cli| cli.run()) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read the output wants no more of it, as `head` does.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => match error.downcast::<clap::Error>() {
            // `--help`, too.
            Ok(wrong_flags) => wrong_flags.exit(),
            Err(error) => {
                let fault = error.downcast_ref::<Fault>();
                let code = fault.map_or(ExitCode::FAILURE, |fault| ExitCode::from(fault.exit_code()));
                if let Some(Fault::ReportedByRank0 { .. }) = fault {
                    return code;
                }
                // Nobody is left to hear of a standard error that is closed.
                let _ = writeln!(stderr(), "error: {}", one_line(&format!("{error:#}")));
                code
            }
        },
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
        || error.root_cause().downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
