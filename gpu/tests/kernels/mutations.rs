//! Checks that the mutations of `scripts/mutate` apply to the sources. The script itself takes too long for CI.

use std::fs;
use std::path::Path;

/// The fields of a mutation that this test uses.
#[derive(serde::Deserialize)]
struct Mutation {
    kernel: String,
    kind: String,
    file: String,
    find: String,
    replace: String,
    test: String,
}

#[derive(serde::Deserialize)]
struct File {
    mutation: Vec<Mutation>,
}

#[test]
fn mutations_apply() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = package.join("..");
    let (mut count, mut wrong) = (0, Vec::new());
    for entry in fs::read_dir(package.join("tests/mutations")).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let file: File = toml::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for Mutation { kernel, kind, file, find, replace, test } in file.mutation {
            count += 1;
            let source = fs::read_to_string(root.join(&file)).unwrap_or_default();
            let found = source.matches(&find).count();
            if found != 1 {
                wrong.push(format!("{kernel}, {kind}: expected the snippet once in {file}, found it {found} times"));
            }
            if find == replace {
                wrong.push(format!("{kernel}, {kind}: expected a replacement that differs from the snippet"));
            }
            if !package.join("tests/kernels").join(format!("{test}.rs")).exists() {
                wrong.push(format!("{kernel}, {kind}: expected a file {test}.rs in gpu/tests/kernels"));
            }
        }
    }
    assert!(count > 600, "{count} mutations");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
