//! Builds the HTML files: expands directives and formulas, renders, and checks links and warnings.

use crate::directive::Sources;
use crate::{formula, links};
use anyhow::{Context, Result, ensure};
use mdbook_driver::MDBook;
use mdbook_preprocessor::book::{Book, BookItem};
use mdbook_preprocessor::{Preprocessor, PreprocessorContext};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tracing_subscriber::filter::LevelFilter;

/// Builds the book in `out`.
///
/// `repository` is the address before the paths of linked source files; without it, the links lead to the files of this checkout.
///
/// # Errors
/// A directive, formula, link or figure is wrong, a chapter is missing in `SUMMARY.md`, or mdBook warns.
pub fn build(out: &Path, repository: Option<&str>) -> Result<()> {
    let root = repository_root()?;
    fs::create_dir_all(out).with_context(|| format!("--out: cannot create {}", out.display()))?;
    let out = out.canonicalize()?;
    let base = match repository {
        Some(url) => url.trim_end_matches('/').to_owned(),
        None => format!("file://{}", root.display()),
    };
    let book = root.join("docs/book");
    let warnings = Warnings::default();
    let writer = warnings.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::WARN)
        .without_time()
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || -> Result<()> {
        let mut book = MDBook::load(&book)?;
        book.config.build.build_dir.clone_from(&out);
        book.with_preprocessor(Expand { sources: Sources::new(root.clone(), base) });
        book.build()
    })?;
    let warnings = warnings.text();
    ensure!(warnings.is_empty(), "{}: expected no warnings of mdBook, found:\n{warnings}", book.display());
    links::check_listed(&book.join("chapters"))?;
    links::check_html(&out)
}

/// Returns the root of the repository that this program was built from.
pub fn repository_root() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().with_context(|| format!("{}: the sources of the book are not there", root.display()))
}

/// Expands directives, formulas and links to source files.
struct Expand {
    sources: Sources,
}

impl Preprocessor for Expand {
    fn name(&self) -> &'static str {
        "sources"
    }

    fn run(&self, _: &PreprocessorContext, mut book: Book) -> Result<Book> {
        let mut outcome = Ok(());
        book.for_each_mut(|item| {
            if let BookItem::Chapter(chapter) = item
                && outcome.is_ok()
            {
                let name = chapter.path.clone().unwrap_or_default();
                match self.chapter(&chapter.content).with_context(|| format!("docs/book/chapters/{}", name.display())) {
                    Ok(content) => chapter.content = content,
                    Err(error) => outcome = Err(error),
                }
            }
        });
        outcome.map(|()| book)
    }
}

impl Expand {
    fn chapter(&self, text: &str) -> Result<String> {
        let text = self.sources.expand(text)?;
        formula::convert(&text, &self.sources)
    }
}

/// The warnings of mdBook.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<u8>>>);

impl Warnings {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}

impl Write for Warnings {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
