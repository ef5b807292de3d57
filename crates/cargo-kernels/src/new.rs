//! `cargo kernels new`: writes a crate from the template.

use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};

/// Options of `cargo kernels new`.
#[derive(clap::Args)]
pub struct New {
    /// The directory to create; its last part is the name of the crate
    #[arg(value_name = "NAME")]
    directory: PathBuf,
    /// Depend on the crates in this checkout of llm.rs [default: the checkout that cargo-kernels was built in]
    #[arg(long, value_name = "CHECKOUT", conflicts_with = "git")]
    path: Option<PathBuf>,
    /// Depend on the crates in this git repository
    #[arg(long, value_name = "URL")]
    git: Option<String>,
    /// Use this commit of the git repository
    #[arg(long, value_name = "COMMIT", requires = "git")]
    rev: Option<String>,
}

/// The files of the template. `gitignore` has no dot, so that it does not apply to this repository.
const FILES: [(&str, &str); 10] = [
    ("Cargo.toml", include_str!("../template/Cargo.toml.in")),
    ("kernels/Cargo.toml", include_str!("../template/kernels/Cargo.toml.in")),
    ("kernels/src/lib.rs", include_str!("../template/kernels/src/lib.rs")),
    ("build.rs", include_str!("../template/build.rs")),
    ("src/lib.rs", include_str!("../template/src/lib.rs")),
    ("src/main.rs", include_str!("../template/src/main.rs")),
    ("tests/emulated.rs", include_str!("../template/tests/emulated.rs")),
    ("benches/kernels.rs", include_str!("../template/benches/kernels.rs")),
    ("README.md", include_str!("../template/README.md")),
    (".gitignore", include_str!("../template/gitignore")),
];

/// The keywords of Rust 2024, which cannot be crate names.
const KEYWORDS: [&str; 52] = [
    "Self", "gen", "yield", "abstract", "as", "async", "await", "become", "box", "break", "const", "continue", "crate",
    "do", "dyn", "else", "enum", "extern", "false", "final", "fn", "for", "if", "impl", "in", "let", "loop", "macro",
    "match", "mod", "move", "mut", "override", "priv", "pub", "ref", "return", "self", "static", "struct", "super",
    "trait", "true", "try", "type", "typeof", "unsafe", "unsized", "use", "virtual", "where", "while",
];

/// Names of standard library crates, and of directories that cargo creates next to a program.
const RESERVED: [&str; 8] = ["test", "core", "std", "alloc", "build", "deps", "examples", "incremental"];

/// The crates that a created crate depends on.
const CRATES: [&str; 4] = ["cuda_std", "cuda_builder", "cuda_driver", "find_cuda_helper"];

/// Creates the crate and prints what to do next.
pub fn run(options: &New) -> Result<()> {
    let directory = &options.directory;
    let name = crate_name(directory)?;
    let source = Source::of(options)?;
    ensure!(
        !directory.exists(),
        "{}: expected a directory that does not exist, found one; choose another name or remove it",
        directory.display()
    );
    for (file, template) in FILES {
        let path = directory.join(file);
        let parent = path.parent().unwrap_or(directory);
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        fs::write(&path, render(template, &name, &source))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    println!("created {}; next:\n", directory.display());
    println!("    cd {}", quoted(directory));
    println!("    cargo kernels doctor    # are all tools installed?");
    println!("    cargo kernels test      # in the emulator, which needs no GPU");
    println!("    cargo run --release     # on a GPU");
    Ok(())
}

/// Returns a path as a word of a shell command.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+@".contains(c);
    if text.chars().all(is_plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

/// Returns the name of the crate in a directory that is to be created.
fn crate_name(directory: &Path) -> Result<String> {
    let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let valid = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
    ensure!(valid, "NAME: expected a letter, then letters, digits, - and _, found {name:?}; choose another name");
    ensure!(
        !KEYWORDS.contains(&name),
        "NAME: expected a name that is not a keyword of Rust, found {name}; choose another name"
    );
    if CRATES.contains(&name) || RESERVED.contains(&name) {
        bail!("NAME: expected a name that no other crate has, found {name}; choose another name");
    }
    Ok(name.to_owned())
}

/// The place of the crates of llm.rs.
enum Source {
    Checkout(PathBuf),
    Git { url: String, rev: Option<String> },
}

impl Source {
    fn of(options: &New) -> Result<Self> {
        if let Some(url) = &options.git {
            return Ok(Self::Git { url: url.clone(), rev: options.rev.clone() });
        }
        let built_in = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let checkout = options.path.clone().unwrap_or_else(built_in);
        let missing = CRATES.iter().find(|name| !checkout.join("crates").join(name).join("Cargo.toml").is_file());
        if let Some(missing) = missing {
            bail!(
                "{}: expected a checkout of llm.rs, found no crates/{missing} in it; give the checkout with --path, or a repository with --git",
                checkout.display()
            );
        }
        let absolute = checkout.canonicalize().with_context(|| format!("cannot read {}", checkout.display()))?;
        Ok(Self::Checkout(absolute))
    }

    /// Returns the value of a dependency in a manifest.
    fn dependency(&self, name: &str, features: &str) -> String {
        match self {
            Self::Checkout(path) => {
                let directory = path.join("crates").join(name).display().to_string();
                format!("{{ path = {directory:?}{features} }}")
            }
            Self::Git { url, rev: None } => format!("{{ git = {url:?}{features} }}"),
            Self::Git { url, rev: Some(rev) } => format!("{{ git = {url:?}, rev = {rev:?}{features} }}"),
        }
    }
}

/// Replaces the names and dependencies of a template.
fn render(template: &str, name: &str, source: &Source) -> String {
    let mut text = template.replace("{{name}}", name).replace("{{ident}}", &name.replace('-', "_"));
    for dependency in CRATES {
        text = text.replace(&format!("{{{{{dependency}}}}}"), &source.dependency(dependency, ""));
    }
    text.replace("{{cuda_std_checked}}", &source.dependency("cuda_std", ", features = [\"checked\"]"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_crates_are_checked() {
        assert_eq!(crate_name(Path::new("/tmp/my-kernels")).unwrap(), "my-kernels");
        for wrong in ["fn", "gen", "yield", "deps", "1st", "a b", "..", "cuda_std", "x/é"] {
            let error = crate_name(Path::new(wrong)).unwrap_err().to_string();
            assert!(error.starts_with("NAME: expected "), "{error}");
        }
    }

    #[test]
    fn the_directory_can_be_pasted_into_a_shell() {
        assert_eq!(quoted(Path::new("/tmp/my-kernels")), "/tmp/my-kernels");
        assert_eq!(quoted(Path::new("/tmp/it's mine/k")), r"'/tmp/it'\''s mine/k'");
    }

    #[test]
    fn a_template_is_filled_for_each_source() {
        let git = |rev: Option<&str>| Source::Git { url: "https://example.org/x".into(), rev: rev.map(str::to_owned) };
        for (_, template) in FILES {
            let text = render(template, "my-kernels", &git(None));
            assert!(!text.contains("{{"), "{text}");
        }
        let manifest = render(FILES[1].1, "my-kernels", &git(Some("abc")));
        let expected = r#"cuda_std = { git = "https://example.org/x", rev = "abc", features = ["checked"] }"#;
        assert!(manifest.contains("name = \"my_kernels_kernels\"") && manifest.contains(expected), "{manifest}");
        let manifest = render(FILES[0].1, "k", &Source::Checkout("/llm.rs".into()));
        assert!(manifest.contains(r#"find_cuda_helper = { path = "/llm.rs/crates/find_cuda_helper" }"#), "{manifest}");
    }
}
