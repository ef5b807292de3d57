//! The commands of a conversation.

use anyhow::{Result, bail};
use std::path::PathBuf;

/// The output of `/help`.
pub const HELP: &str = "\
/retry        another answer to the last message
/save FILE    write the conversation to a new file, as JSON with `messages`
/system TEXT  instructions before the conversation; without TEXT: none
/clear        begin a new conversation
/help         this list
/exit         end the program
A line that begins with a space is a message, whatever follows.
Ctrl-C ends an answer; at the prompt, Ctrl-C or Ctrl-D ends the program.";

/// A command of the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    Retry,
    Save(PathBuf),
    System(Option<String>),
    Clear,
    Help,
    Exit,
    /// A word that looks like a command.
    Unknown(String),
}

impl Command {
    /// Returns the command of a line, or `None` if the line is a message. A line of one word that begins with a slash is an unknown command.
    pub fn parse(line: &str) -> Result<Option<Self>> {
        let line = line.trim_end();
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        Ok(Some(match (word, rest) {
            ("/retry", "") => Self::Retry,
            ("/save", "") => bail!("/save: expected the name of a file, found none; write /save FILE"),
            ("/save", file) => Self::Save(file.into()),
            ("/system", "") => Self::System(None),
            ("/system", text) => Self::System(Some(text.to_owned())),
            ("/clear", "") => Self::Clear,
            ("/help", "") => Self::Help,
            ("/exit", "") => Self::Exit,
            (name, "") if name.len() > 1 && name.starts_with('/') && !name[1..].contains('/') => {
                Self::Unknown(name.to_owned())
            }
            _ => return Ok(None),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_told_from_messages() {
        let parse = |line: &str| Command::parse(line).unwrap();
        assert_eq!(parse("/retry "), Some(Command::Retry));
        assert_eq!(parse("/save my talk.json"), Some(Command::Save("my talk.json".into())));
        assert_eq!(parse("/system  Be brief.\n"), Some(Command::System(Some("Be brief.".to_owned()))));
        assert_eq!(parse("/system"), Some(Command::System(None)));
        assert_eq!(
            [parse("/clear"), parse("/help"), parse("/exit")],
            [Command::Clear, Command::Help, Command::Exit].map(Some)
        );
        for message in ["", "hello", " /exit", "/", "/usr/bin", "/retry now", "/exit is a command", "1/2"] {
            assert_eq!(parse(message), None, "{message}");
        }
        assert_eq!(parse("/load"), Some(Command::Unknown("/load".to_owned())));
        assert!(Command::parse("/save").unwrap_err().to_string().contains("expected the name of a file"));
    }
}
