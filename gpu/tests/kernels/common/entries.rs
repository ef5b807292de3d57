//! Checks that the tests launch every PTX entry point of the kernels that they cover.

use cuda_std::launch::Launch;
use proc_macro2::{TokenStream, TokenTree};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, Once};
use syn::{Item, Meta};

static LAUNCHED: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

/// Records a launch.
pub fn launched(launch: &Launch) {
    LAUNCHED.lock().unwrap().insert(launch.name());
}

/// Runs `test` unless it has run already, in its own libtest case or for `every_entry_point_is_launched`.
pub fn once(done: &Once, test: impl FnOnce()) {
    done.call_once_force(|state| {
        assert!(!state.is_poisoned(), "this test requires another test, which failed");
        test();
    });
}

/// Fails unless the tests launched every entry point of the kernels in these files or directories of `gpu/src`.
pub fn assert_launched(sources: &[&str]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut entries = BTreeSet::new();
    for source in sources {
        let before = entries.len();
        collect(&root.join(source), &mut entries);
        assert!(entries.len() > before, "no kernel in {source}");
    }
    let launched = LAUNCHED.lock().unwrap();
    let missing: Vec<_> = entries.iter().filter(|entry| !launched.contains(entry.as_str())).collect();
    assert!(missing.is_empty(), "no test launches {missing:?}");
}

/// Adds the names of the entry points in a file, or in all files of a directory, to `entries`.
fn collect(path: &Path, entries: &mut BTreeSet<String>) {
    if path.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            collect(&entry.unwrap().path(), entries);
        }
        return;
    }
    let file = syn::parse_file(&fs::read_to_string(path).unwrap()).unwrap();
    for item in &file.items {
        let Item::Fn(function) = item else { continue };
        for attribute in &function.attrs {
            if let Meta::List(list) = &attribute.meta
                && list.path.is_ident("kernel")
            {
                let kernel = function.sig.ident.to_string();
                match instances(&list.tokens) {
                    suffixes if suffixes.is_empty() => _ = entries.insert(kernel),
                    suffixes => entries.extend(suffixes.iter().map(|suffix| format!("{kernel}_{suffix}"))),
                }
            }
        }
    }
}

/// Returns the names in `instances(name = <…>, …)`.
fn instances(options: &TokenStream) -> Vec<String> {
    let tokens: Vec<_> = options.clone().into_iter().collect();
    let list = tokens.windows(2).find_map(|pair| match pair {
        [TokenTree::Ident(key), TokenTree::Group(list)] if key == "instances" => Some(list.stream()),
        _ => None,
    });
    let tokens: Vec<_> = list.unwrap_or_default().into_iter().collect();
    let name = |three: &[TokenTree]| match three {
        [TokenTree::Ident(name), TokenTree::Punct(equals), TokenTree::Punct(open)]
            if equals.as_char() == '=' && open.as_char() == '<' =>
        {
            Some(name.to_string())
        }
        _ => None,
    };
    tokens.windows(3).filter_map(name).collect()
}
