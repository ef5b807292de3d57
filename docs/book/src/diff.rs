//! Differences between two versions of an item.

use similar::TextDiff;

/// Unchanged lines around a change.
const CONTEXT: usize = 3;

/// Returns the lines of a unified diff without file names; groups of changes are separated by a line of three dots.
pub fn lines(old: &str, new: &str) -> String {
    let diff = TextDiff::from_lines(old, new);
    let groups = diff.grouped_ops(CONTEXT).into_iter().map(|group| {
        let changes = group.iter().flat_map(|op| diff.iter_changes(op));
        changes.map(|change| format!("{}{}", change.tag(), change)).collect::<Vec<_>>().concat()
    });
    groups.collect::<Vec<_>>().join(" ...\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_hold_changes_with_context() {
        let old: Vec<_> = (0..20).map(|i| format!("{i}\n")).collect();
        let new = old.concat().replace("2\n3\n", "2\nthree\n").replace("18\n", "");
        let expected = " 0\n 1\n 2\n-3\n+three\n 4\n 5\n 6\n ...\n 15\n 16\n 17\n-18\n 19\n";
        assert_eq!(lines(&old.concat(), &new), expected);
    }
}
