//! A screen of characters, and the terminal that shows it and reads keys.

use anyhow::Result;
use console::measure_text_width;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Write, stdout};
use std::time::Duration;

/// The parameters of an SGR control sequence (ECMA-48, section 8.3.117): a color, [`DIM`] or [`PLAIN`].
pub type Style = &'static str;
pub const PLAIN: Style = "";
pub const DIM: Style = "2";

/// The first of the 256 braille characters. The lowest 8 bits of a character are its dots.
const BRAILLE: u32 = 0x2800;
/// Bits of the dots by column and row.
const DOTS: [[u32; 4]; 2] = [[0x01, 0x02, 0x04, 0x40], [0x08, 0x10, 0x20, 0x80]];

/// A grid of characters.
pub struct Screen {
    pub width: usize,
    pub height: usize,
    /// Row by row. The second cell of a wide character is `None`.
    cells: Vec<(Option<char>, Style)>,
}

impl Screen {
    pub fn new((width, height): (usize, usize)) -> Self {
        Self { width, height, cells: vec![(Some(' '), PLAIN); width * height] }
    }

    fn set(&mut self, x: usize, y: usize, cell: (Option<char>, Style)) {
        if x < self.width && y < self.height {
            self.cells[y * self.width + x] = cell;
        }
    }

    /// Writes a text. The part outside of the screen is left out, and so are control characters.
    pub fn text(&mut self, mut x: usize, y: usize, text: &str, style: Style) {
        for c in text.chars().filter(|c| !c.is_control()) {
            let width = measure_text_width(c.encode_utf8(&mut [0; 4]));
            if width == 0 || x + width > self.width {
                continue;
            }
            self.set(x, y, (Some(c), style));
            (1..width).for_each(|next| self.set(x + next, y, (None, style)));
            x += width;
        }
    }

    /// Draws a dot. A cell has two columns and four rows of them.
    fn dot(&mut self, x: usize, y: usize, style: Style) {
        let (column, row) = (x / 2, y / 4);
        if column >= self.width || row >= self.height {
            return;
        }
        let before = self.cells[row * self.width + column].0.map_or(0, u32::from);
        let dots = if before & !0xff == BRAILLE { before } else { BRAILLE };
        self.set(column, row, (char::from_u32(dots | DOTS[x % 2][y % 4]), style));
    }

    /// Draws a line of dots between two positions, counted in dots.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), style: Style) {
        let (dx, dy) = (to.0 - from.0, to.1 - from.1);
        let steps = dx.abs().max(dy.abs()).ceil().max(1.0);
        for step in 0..=steps as usize {
            let at = step as f64 / steps;
            self.dot((from.0 + at * dx).round() as usize, (from.1 + at * dy).round() as usize, style);
        }
    }

    /// Returns the control sequences that show the screen in a terminal.
    fn sequences(&self) -> String {
        let mut text = String::new();
        for (y, row) in self.cells.chunks(self.width.max(1)).enumerate() {
            let _ = write!(text, "\x1b[{};1H", y + 1);
            for cells in row.chunk_by(|a, b| a.1 == b.1) {
                let _ = write!(text, "\x1b[0;{}m", cells[0].1);
                text.extend(cells.iter().filter_map(|(c, _)| *c));
            }
        }
        text + "\x1b[0m"
    }

    /// Shows the screen. A [`Terminal`] must be open.
    pub fn show(&self) -> Result<()> {
        print(&self.sequences())
    }

    /// Returns the characters, one line for each row.
    #[cfg(test)]
    pub fn to_text(&self) -> String {
        let row = |row: &[(Option<char>, Style)]| row.iter().filter_map(|(c, _)| *c).chain(['\n']).collect::<String>();
        self.cells.chunks(self.width.max(1)).map(row).collect()
    }
}

/// The terminal of this process, which shows screens until this value is dropped.
pub struct Terminal {
    device: File,
    before: Termios,
}

impl Terminal {
    /// Takes over the terminal: its lines of before are hidden, and keys are not echoed.
    pub fn open() -> Result<Self> {
        let device = File::open("/dev/tty")?;
        let before = tcgetattr(&device)?;
        let terminal = Self { device, before };
        let mut raw = terminal.before.clone();
        raw.make_raw();
        tcsetattr(&terminal.device, OptionalActions::Now, &raw)?;
        // The alternate screen, without a cursor.
        print("\x1b[?1049h\x1b[?25l")?;
        Ok(terminal)
    }

    /// Returns the number of columns and rows.
    pub fn size(&self) -> Result<(usize, usize)> {
        let size = tcgetwinsize(&self.device)?;
        Ok((size.ws_col.into(), size.ws_row.into()))
    }

    /// Waits for keys. Returns their bytes: none after `timeout`. `None` if the terminal was closed.
    pub fn bytes(&mut self, timeout: Duration) -> Result<Option<Vec<u8>>> {
        let timeout = Timespec::try_from(timeout)?;
        match poll(&mut [PollFd::new(&self.device, PollFlags::IN)], Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => return Ok(Some(Vec::new())),
            polled => polled?,
        };
        let mut bytes = [0; 64];
        let length = self.device.read(&mut bytes)?;
        Ok((length > 0).then(|| bytes[..length].to_vec()))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A terminal that was closed needs no restoring.
        let _ = print("\x1b[?25h\x1b[?1049l");
        let _ = tcsetattr(&self.device, OptionalActions::Now, &self.before);
    }
}

fn print(sequences: &str) -> Result<()> {
    let mut out = stdout().lock();
    out.write_all(sequences.as_bytes())?;
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_at_the_edge() {
        let mut screen = Screen::new((6, 2));
        screen.text(1, 0, "a\x1b\u{301}語bcd", DIM);
        screen.text(4, 1, "語語", PLAIN);
        screen.text(0, 7, "below", PLAIN);
        assert_eq!(screen.to_text(), " a語bc\n    語\n");
        assert_eq!(screen.sequences(), "\x1b[1;1H\x1b[0;m \x1b[0;2ma語bc\x1b[2;1H\x1b[0;m    語\x1b[0m");
    }

    #[test]
    fn lines_consist_of_dots() {
        let mut screen = Screen::new((2, 2));
        screen.line((0.0, 0.0), (3.0, 7.0), "31");
        screen.line((3.0, 0.0), (3.0, 0.0), "32");
        screen.line((0.0, 0.0), (9.0, 0.0), PLAIN);
        assert_eq!(screen.to_text(), "⢫⠉\n ⢣\n");
    }
}
