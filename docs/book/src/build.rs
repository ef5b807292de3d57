//! Builds the HTML files: converts formulas and links, renders, and checks links and warnings.

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
/// A formula, link or figure is wrong, a chapter is missing in `SUMMARY.md`, or mdBook warns.
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
        book.with_preprocessor(Convert { base });
        book.build()
    })?;
    let warnings = warnings.text();
    ensure!(warnings.is_empty(), "{}: expected no warnings of mdBook, found:\n{warnings}", book.display());
    links::check_listed(&book.join("chapters"))?;
    links::check_html(&out)
}

/// Returns the root of the repository that this program was built from.
///
/// # Errors
/// It is no longer there.
pub fn repository_root() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().with_context(|| format!("{}: the sources of the book are not there", root.display()))
}

/// Converts formulas, and links to files outside of the chapters.
struct Convert {
    /// The address before the path of a linked file.
    base: String,
}

impl Preprocessor for Convert {
    fn name(&self) -> &'static str {
        "formulas-and-links"
    }

    fn run(&self, _: &PreprocessorContext, mut book: Book) -> Result<Book> {
        let mut outcome = Ok(());
        book.for_each_mut(|item| {
            if let BookItem::Chapter(chapter) = item
                && outcome.is_ok()
            {
                let name = chapter.path.clone().unwrap_or_default();
                let address = |link: &str| {
                    let path = links::normal(&Path::new("docs/book/chapters").join(link));
                    format!("{}/{}", self.base, path.display())
                };
                let content = formula::convert(&chapter.content, address);
                match content.with_context(|| format!("docs/book/chapters/{}", name.display())) {
                    Ok(content) => chapter.content = content,
                    Err(error) => outcome = Err(error),
                }
            }
        });
        outcome.map(|()| book)
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
