//! Parts of PTX: entry points, launch bounds and source lines.

use cuda_builder::LaunchBounds;

/// Returns the names of the entry points.
pub fn entries(ptx: &str) -> Vec<&str> {
    let name = |line: &'_ str| line.split_once(".entry ").map(|(_, rest)| rest.trim_start().len());
    ptx.lines()
        .filter_map(|line| {
            let rest = &line[line.len() - name(line)?..];
            Some(&rest[..rest.find(['(', ' ']).unwrap_or(rest.len())])
        })
        .collect()
}

/// Returns the part of a module's PTX that defines a kernel: from `.visible .entry name` to the closing brace of its body.
pub fn find_entry<'a>(ptx: &'a str, kernel: &str) -> Option<&'a str> {
    let named = |start: &usize| {
        let after = ptx[start + ".entry".len()..].trim_start();
        after.strip_prefix(kernel).is_some_and(|rest| rest.starts_with(|c: char| c == '(' || c.is_whitespace()))
    };
    let entry = ptx.match_indices(".entry").map(|(at, _)| at).find(named)?;
    let start = ptx[..entry].rfind('\n').map_or(0, |newline| newline + 1);
    let mut depth = 0;
    for (at, brace) in ptx[entry..].match_indices(['{', '}']) {
        depth += if brace == "{" { 1 } else { -1 };
        if depth == 0 {
            return Some(&ptx[start..=entry + at]);
        }
    }
    None
}

/// Returns the launch bounds that an entry point declares.
pub fn bounds(entry: &str) -> LaunchBounds {
    let directive = |name: &str| {
        let line = entry.lines().take_while(|line| *line != "{").find(|line| line.trim_start().starts_with(name))?;
        let numbers = line.trim_start()[name.len()..].split("//").next()?;
        Some(numbers.split(',').filter_map(|number| number.trim().parse().ok()).collect::<Vec<u32>>())
    };
    let extent = |values: Vec<u32>| [0, 1, 2].map(|i| values.get(i).copied().unwrap_or(1));
    let first = |values: Vec<u32>| values.first().copied();
    LaunchBounds {
        threads: directive(".maxntid").map(extent),
        blocks_per_sm: directive(".minnctapersm").and_then(first),
        registers: directive(".maxnreg").and_then(first),
    }
}

/// Returns the paths of the `.file` directives by their number.
pub fn files(ptx: &str) -> Vec<(u32, &str)> {
    let file = |line: &'_ str| line.trim_start().strip_prefix(".file").map(str::len);
    ptx.lines()
        .filter_map(|line| {
            let rest = line[line.len() - file(line)?..].trim();
            let (number, path) = rest.split_once(char::is_whitespace)?;
            Some((number.parse().ok()?, path.trim().trim_matches('"')))
        })
        .collect()
}

/// Returns the file number and the line of a `.loc` directive.
pub fn location(line: &str) -> Option<(u32, u32)> {
    let mut words = line.trim_start().strip_prefix(".loc")?.split_whitespace();
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}
