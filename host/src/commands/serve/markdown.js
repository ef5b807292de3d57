/* Markdown of answers as elements. Text of a model only becomes text nodes and `href`s of links to http, https and mailto addresses, which
   a reader must click: no HTML, no images, no scripts. A pass over a text takes a time linear in its length: the expressions do not
   backtrack over long runs, and no search is repeated for the same place. */
"use strict";
const { showMarkdown, copyText } = (() => {
/* Deepest nesting of quotes, lists and emphasis. Deeper ones are plain text. */
const MAX_DEPTH = 8;
/* Largest number of columns of a table. */
const MAX_COLUMNS = 64;

/* Longest address of a link. */
const MAX_ADDRESS = 2048;

/* `children` are elements and strings. */
const element = (kind, children = []) => {
  const made = document.createElement(kind);
  for (const child of children) made.append(child);
  return made;
};

/* Returns the address of a link, or null if a browser would do anything but open a page or write a mail. */
const safeAddress = (text) => {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
};
const link = (address, text) => {
  const made = element("a", [text]);
  made.href = address;
  made.rel = "noopener noreferrer nofollow";
  made.target = "_blank";
  return made;
};

/* Emphasis by its marker. */
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const isWord = (c) => c !== undefined && /[\p{L}\p{N}]/u.test(c);
const isSpace = (c) => c === undefined || /\s/.test(c);

/* Returns the nodes of a paragraph's text. */
const inline = (text, depth = 0) => {
  const nodes = [];
  let [start, i] = [0, 0];
  /* Where the next one of a string is. A search is not repeated before it has been passed. */
  const found = new Map();
  const next = (what, from) => {
    const known = found.get(what);
    if (known !== undefined && (known === -1 || known >= from)) return known;
    const at = text.indexOf(what, from);
    found.set(what, at);
    return at;
  };
  /* Markers that nothing closes in the rest of the text. */
  const open = new Set();
  const closing = (mark, from) => {
    if (open.has(mark)) return -1;
    for (let at = text.indexOf(mark, from); at !== -1; at = text.indexOf(mark, at + 1)) {
      const [before, after] = [text[at - 1], text[at + mark.length]];
      if (at > from && !isSpace(before) && (mark.length === 2 || (before !== mark && after !== mark))
        && (mark[0] !== "_" || !isWord(after))) return at;
    }
    open.add(mark);
    return -1;
  };
  const take = (end, node) => {
    if (start < i) nodes.push(text.slice(start, i));
    nodes.push(node);
    start = i = end;
  };
  while (i < text.length) {
    const c = text[i];
    if (c === "\\" && i + 1 < text.length && /[!-/:-@[-`{-~]/.test(text[i + 1])) {
      take(i + 2, text[i + 1]);
      continue;
    }
    if (c === "`") {
      const ticks = /`+/y;
      ticks.lastIndex = i;
      const run = ticks.exec(text)[0];
      const end = next(run, i + run.length);
      if (end !== -1) {
        take(end + run.length, element("code", [text.slice(i + run.length, end)]));
      } else {
        i += run.length;
      }
      continue;
    }
    /* An image becomes a link: loading it would tell another server about the conversation. */
    const isImage = c === "!" && text[i + 1] === "[";
    if (c === "[" || isImage) {
      const from = i + (isImage ? 2 : 1);
      const middle = next("](", from);
      const end = middle === -1 ? -1 : next(")", middle);
      const inner = next("[", from);
      if (end !== -1 && end - middle < MAX_ADDRESS && (inner === -1 || inner > middle)) {
        const [address] = text.slice(middle + 2, end).trim().split(/\s/, 1);
        const target = safeAddress(address);
        if (target !== null) {
          take(end + 1, link(target, text.slice(from, middle) || address));
          continue;
        }
      }
    }
    if (c === "h" && !isWord(text[i - 1]) && /^https?:\/\//.test(text.slice(i, i + 8))) {
      const address = /[^\s<>"'`]{0,2048}/y;
      address.lastIndex = i;
      let [shown] = address.exec(text);
      while (/[.,;:!?)\]*_]/.test(shown.at(-1) ?? "")) shown = shown.slice(0, -1);
      const target = safeAddress(shown);
      if (target !== null) {
        take(i + shown.length, link(target, shown));
        continue;
      }
    }
    const mark = depth < MAX_DEPTH && MARKS.find(([marker]) => text.startsWith(marker, i));
    if (mark) {
      const [marker, kind] = mark;
      const from = i + marker.length;
      if (!isSpace(text[from]) && (c !== "_" || !isWord(text[i - 1]))) {
        const end = closing(marker, from);
        if (end !== -1) {
          take(end + marker.length, element(kind, inline(text.slice(from, end), depth + 1)));
          continue;
        }
      }
      i = from;
      continue;
    }
    i += 1;
  }
  if (start < text.length) nodes.push(text.slice(start));
  return nodes;
};

/* Copies text, also on pages without TLS, where browsers have no clipboard API. */
const copyText = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = element("textarea");
    field.readOnly = true;
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
};
const codeBlock = (code, language) => {
  const button = element("button", ["Copy"]);
  button.type = "button";
  button.addEventListener("click", async () => {
    await copyText(code);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  const bar = element("div", [element("span", [language]), button]);
  bar.className = "code-bar";
  const pre = element("pre", [element("code", [code])]);
  pre.tabIndex = 0;
  const block = element("div", [bar, pre]);
  block.className = "code";
  return block;
};

const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/s;
const HEADING = /^ {0,3}(#{1,6})(\s.*)?$/s;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*)|)$/s;
const QUOTE = /^ {0,3}>/;
const isOrdered = (line) => /^\s*\d/.test(line);
const isBlank = (line) => line.trim() === "";
const indent = (line) => line.length - line.trimStart().length;
const cells = (line) => {
  const inner = line.trim().slice(line.trim().startsWith("|") ? 1 : 0);
  return (inner.endsWith("|") ? inner.slice(0, -1) : inner).split("|", MAX_COLUMNS).map((part) => part.trim());
};
const isTable = (lines, i) => lines[i].includes("|") && i + 1 < lines.length && lines[i + 1].includes("-")
  && cells(lines[i + 1]).every((part) => /^:?-+:?$/.test(part));
const startsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((start) => start.test(line));

/* Returns the end of the block that begins at line `i`, which is not blank. */
const blockEnd = (lines, i) => {
  const fence = FENCE.exec(lines[i]);
  let end = i + 1;
  if (fence) {
    const closes = (line) => line.trim().startsWith(fence[1]) && /^(`+|~+)$/.test(line.trim());
    while (end < lines.length && !closes(lines[end])) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(lines[i]) || RULE.test(lines[i])) return end;
  if (QUOTE.test(lines[i])) {
    while (end < lines.length && !isBlank(lines[end]) && (QUOTE.test(lines[end]) || !startsBlock(lines[end]))) end += 1;
    return end;
  }
  if (ITEM.test(lines[i])) {
    /* A blank line ends a list, unless another item or an indented line follows. */
    const [outer, ordered] = [indent(lines[i]), isOrdered(lines[i])];
    const continues = (line) => indent(line) > outer + 1 || (ITEM.test(line) ? isOrdered(line) === ordered : indent(line) > outer);
    while (end < lines.length) {
      if (isBlank(lines[end])) {
        if (end + 1 >= lines.length || isBlank(lines[end + 1]) || !continues(lines[end + 1])) break;
      } else if (!continues(lines[end]) && (startsBlock(lines[end]) || isBlank(lines[end - 1]))) {
        break;
      }
      end += 1;
    }
    return end;
  }
  if (isTable(lines, i)) {
    end += 1;
    while (end < lines.length && lines[end].includes("|")) end += 1;
    return end;
  }
  while (end < lines.length && !isBlank(lines[end]) && !startsBlock(lines[end]) && !isTable(lines, end)) end += 1;
  return end;
};

/* Returns the ranges of lines of the blocks. */
const blockRanges = (lines) => {
  const ranges = [];
  for (let i = 0; i < lines.length;) {
    if (isBlank(lines[i])) {
      i += 1;
      continue;
    }
    const end = blockEnd(lines, i);
    ranges.push([i, end]);
    i = end;
  }
  return ranges;
};

const lineBreaks = (lines) => lines.flatMap((line, i) => [
  ...(i > 0 ? [element("br")] : []), ...inline(line.trim())]);

const list = (lines, depth) => {
  const made = element(isOrdered(lines[0]) ? "ol" : "ul");
  if (isOrdered(lines[0])) made.start = parseInt(lines[0], 10);
  const outer = indent(lines[0]);
  let item = [];
  const finish = () => {
    if (item.length === 0) return;
    const least = item.slice(1).reduce((least, line) => (isBlank(line) ? least : Math.min(least, indent(line))), 8);
    const inner = [item[0], ...item.slice(1).map((line) => line.slice(Math.min(least, indent(line))))];
    made.append(element("li", blocks(inner, depth + 1)));
    item = [];
  };
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && indent(line) <= outer + 1) {
      finish();
      item = [found[3] ?? ""];
    } else {
      item.push(line);
    }
  }
  finish();
  return made;
};

const table = (lines) => {
  const header = cells(lines[0]);
  const row = (kind, line) => {
    const found = cells(line);
    return element("tr", header.map((_, i) => element(kind, inline(found[i] ?? ""))));
  };
  const made = element("table", [element("thead", [row("th", lines[0])]),
    element("tbody", lines.slice(2).map((line) => row("td", line)))]);
  const wide = element("div", [made]);
  wide.className = "table";
  wide.tabIndex = 0;
  return wide;
};

/* Returns the element of a block. */
const block = (lines, depth) => {
  const fence = FENCE.exec(lines[0]);
  if (fence) {
    const closed = lines.length > 1 && /^\s*(`{3,}|~{3,})\s*$/.test(lines[lines.length - 1]);
    return codeBlock(lines.slice(1, closed ? -1 : undefined).join("\n"), fence[2].trim().split(/\s/, 1)[0]);
  }
  const heading = HEADING.exec(lines[0]);
  if (heading) {
    /* The page has headings of the first two levels. */
    const text = (heading[2] ?? "").trim().replace(/\s#+$/, "");
    return element(`h${Math.min(heading[1].length + 2, 6)}`, inline(text));
  }
  if (RULE.test(lines[0])) return element("hr");
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(lines[0])) {
      return element("blockquote", blocks(lines.map((line) => line.replace(/^ {0,3}> ?/, "")), depth + 1));
    }
    if (ITEM.test(lines[0])) return list(lines, depth);
  }
  if (isTable(lines, 0)) return table(lines);
  return element("p", lineBreaks(lines));
};
const blocks = (lines, depth) => blockRanges(lines).map(([start, end]) => block(lines.slice(start, end), depth));

/* Shows Markdown in an element. While a text grows, only the blocks that change are made again. */
const showMarkdown = (into, text) => {
  const lines = text.split(/\r\n|\r|\n/);
  const shown = into.shown ?? [];
  const sources = blockRanges(lines).map(([start, end]) => lines.slice(start, end).join("\n"));
  let same = 0;
  while (same < sources.length && same < shown.length && sources[same] === shown[same]) same += 1;
  while (into.children.length > same) into.lastElementChild.remove();
  for (const source of sources.slice(same)) into.append(block(source.split("\n"), 0));
  into.shown = sources;
};
return { showMarkdown, copyText };
})();
