//! Checks that the tests launch every PTX entry point of the kernels that they cover.

use cuda_std::launch::Launch;
use instances::{parse_axes, parse_instances};
use proc_macro2::{Ident, TokenStream, TokenTree};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, Once};
use syn::parse::{ParseStream, Parser};
use syn::{Item, Meta};

/// The parser of the macro itself.
#[path = "../../../../crates/cuda_std_macros/src/instances.rs"]
#[allow(dead_code, reason = "the tests need the names of instances only")]
mod instances;

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

/// Fails unless the tests launched every entry point of the kernels in these files or directories of `gpu/src` whose name is
/// `covered`.
pub fn assert_launched(sources: &[&str], covered: impl Fn(&str) -> bool) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut entries = BTreeSet::new();
    for source in sources {
        let before = entries.len();
        collect(&root.join(source), &mut entries);
        assert!(entries.len() > before, "no kernel in {source}");
    }
    let launched = LAUNCHED.lock().unwrap().clone();
    let missing: Vec<_> = entries.iter().filter(|entry| covered(entry) && !launched.contains(entry.as_str())).collect();
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
                entries.extend(names(&function.sig.ident, &list.tokens));
            }
        }
    }
}

/// Returns the names of the entry points of a kernel with these options.
fn names(kernel: &Ident, options: &TokenStream) -> Vec<String> {
    let tokens: Vec<_> = options.clone().into_iter().collect();
    let list = |name| {
        let list = tokens.windows(2).find_map(|pair| match pair {
            [TokenTree::Ident(key), TokenTree::Group(list)] if key == name => Some(list.stream()),
            _ => None,
        });
        list.unwrap_or_default()
    };
    let axes = parse_axes.parse2(list("axes")).unwrap();
    let instances = (|input: ParseStream<'_>| parse_instances(input, &axes)).parse2(list("instances")).unwrap();
    if instances.is_empty() {
        return vec![kernel.to_string()];
    }
    instances.iter().map(|instance| instance.entry(kernel).to_string()).collect()
}
