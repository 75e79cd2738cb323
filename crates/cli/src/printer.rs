//! The one place that writes: data to stdout, all else to stderr.
//!
//! Every line reads well without colour. A closed stdout is [`StdoutClosed`], which ends the
//! command with status 0; a closed stderr is ignored.

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd as _;
use std::time::Duration;

use anyhow::Context as _;
use comfy_table::{Cell, CellAlignment, Color, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use serde::Serialize;
use vmfork_api::{CheckStatus, SCHEMA, VmState};

use crate::failure::{Report, StdoutClosed};

/// How much is said besides data and errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    Quiet,
    Normal,
    Verbose,
}

#[derive(Debug, Clone)]
pub(crate) struct Printer {
    pub(crate) json: bool,
    pub(crate) level: Level,
    /// Colour on stdout.
    color: bool,
    /// Bars and spinners on stderr.
    progress: bool,
}

/// One cell of a table.
#[derive(Debug)]
pub(crate) enum Field {
    Text(String),
    /// Right-aligned.
    Figure(String),
    State(VmState),
    /// A word with what it means to the reader.
    Toned(String, Tone),
}

/// What a word in a table means to the reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Good,
    Bad,
    /// It will change by itself.
    Passing,
    Plain,
}

impl Tone {
    fn of(state: VmState) -> Self {
        match state {
            VmState::Running => Self::Good,
            VmState::Failed | VmState::Stalled => Self::Bad,
            VmState::Starting | VmState::Frozen => Self::Passing,
            VmState::Exited | VmState::Paused => Self::Plain,
        }
    }

    fn paint(self, cell: Cell) -> Cell {
        match self {
            Self::Good => cell.fg(Color::Green),
            Self::Bad => cell.fg(Color::Red),
            Self::Passing => cell.fg(Color::Yellow),
            Self::Plain => cell,
        }
    }
}

impl Printer {
    /// `color` and `progress`: whether the environment permits them; both also need a terminal.
    pub(crate) fn new(json: bool, level: Level, color: bool, progress: bool) -> Self {
        let progress = progress && level == Level::Normal && !json && io::stderr().is_terminal();
        Self { json, level, color: color && io::stdout().is_terminal(), progress }
    }

    /// Data, as it is.
    pub(crate) fn data(&self, text: &str) -> anyhow::Result<()> {
        let mut stdout = io::stdout().lock();
        let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
        written.map_err(stdout_error)
    }

    /// One line of data.
    pub(crate) fn line(&self, text: &str) -> anyhow::Result<()> {
        self.data(&format!("{text}\n"))
    }

    /// A document that carries its own `schema`.
    pub(crate) fn document<T: Serialize>(&self, document: &T) -> anyhow::Result<()> {
        let mut text = serde_json::to_string_pretty(document)?;
        text.push('\n');
        self.data(&text)
    }

    /// A document of the fields of `value` (which must be an object) and `schema`.
    pub(crate) fn with_schema<T: Serialize>(&self, value: &T) -> anyhow::Result<()> {
        self.document(&Schema { schema: SCHEMA, value })
    }

    /// One line of a stream of documents.
    pub(crate) fn document_line<T: Serialize>(&self, value: &T) -> anyhow::Result<()> {
        self.line(&serde_json::to_string(&Schema { schema: SCHEMA, value })?)
    }

    /// A word to a person: what was done.
    pub(crate) fn note(&self, text: &str) {
        if self.level != Level::Quiet && !self.json {
            stderr_line(text);
        }
    }

    /// What `-v` adds.
    pub(crate) fn detail(&self, text: &str) {
        if self.level == Level::Verbose {
            stderr_line(text);
        }
    }

    pub(crate) fn warn(&self, text: &str) {
        stderr_line(&format!("warning: {text}"));
    }

    pub(crate) fn error(&self, error: &anyhow::Error) {
        let report = Report::of(error);
        if self.json {
            let document = serde_json::json!({ "schema": SCHEMA, "error": report.body() });
            stderr_line(&document.to_string());
        } else {
            stderr_line(report.text().trim_end());
        }
    }

    /// A table without boxes; columns whose cells are figures are right-aligned.
    pub(crate) fn table(&self, header: &[&str], rows: Vec<Vec<Field>>) -> anyhow::Result<()> {
        self.data(&render_table(header, rows, self.color))
    }

    pub(crate) fn paint_check(&self, status: CheckStatus, text: &str) -> String {
        let color = match status {
            CheckStatus::Ok => "32",
            CheckStatus::Warning => "33",
            CheckStatus::Failed => "31",
        };
        if self.color { format!("\x1b[{color}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// A spinner with the time so far; hidden where there is no terminal.
    pub(crate) fn spinner(&self, message: String) -> ProgressBar {
        let style = ProgressStyle::with_template("{spinner} {msg} {elapsed:.dim}");
        let bar = self.bar(None, style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        bar.set_message(message);
        bar.enable_steady_tick(Duration::from_millis(100));
        bar
    }

    /// A bar that counts to `len`.
    pub(crate) fn steps(&self, len: u64, message: String) -> ProgressBar {
        let bar = self.bar(Some(len), bar_style("{msg} {bar:20} {pos:>5}/{len}"));
        bar.set_message(message);
        bar
    }

    /// A bar of bytes; without `len`, a figure that grows.
    pub(crate) fn bytes(&self, len: Option<u64>, message: String) -> ProgressBar {
        let template = match len {
            Some(_) => {
                "{msg} {bar:20} {binary_bytes:>10}/{binary_total_bytes} {binary_bytes_per_sec}"
            }
            None => "{spinner} {msg} {binary_bytes} {binary_bytes_per_sec}",
        };
        let bar = self.bar(len, bar_style(template));
        bar.set_message(message);
        bar
    }

    fn bar(&self, len: Option<u64>, style: ProgressStyle) -> ProgressBar {
        let target =
            if self.progress { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        ProgressBar::with_draw_target(len, target)
            .with_style(style)
            .with_finish(ProgressFinish::AndClear)
    }

    pub(crate) fn shows_progress(&self) -> bool {
        self.progress
    }
}

fn bar_style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("━╸ ")
}

/// Standard output for bytes that come as a stream. Not `tokio::io::stdout()`: that goes through
/// std's line buffer, which is written out when the program exits, and then Ctrl-C would wait for a
/// reader who does not read.
pub(crate) fn stdout_stream() -> anyhow::Result<tokio::fs::File> {
    let fd = io::stdout().as_fd().try_clone_to_owned().map_err(stdout_error)?;
    Ok(tokio::fs::File::from_std(fd.into()))
}

/// The same of standard error.
pub(crate) fn stderr_stream() -> anyhow::Result<tokio::fs::File> {
    let fd = io::stderr().as_fd().try_clone_to_owned().context("standard error")?;
    Ok(tokio::fs::File::from_std(fd.into()))
}

/// What a failed write to stdout means.
pub(crate) fn stdout_error(error: io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::BrokenPipe {
        StdoutClosed.into()
    } else {
        anyhow::Error::new(error).context("write to standard output")
    }
}

/// Writes one line to stderr; that it can't be written is nothing to act on.
fn stderr_line(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

#[derive(Serialize)]
struct Schema<'a, T> {
    schema: &'static str,
    #[serde(flatten)]
    value: &'a T,
}

/// The word for a state, as the API spells it.
pub(crate) fn state_word(state: VmState) -> &'static str {
    match state {
        VmState::Starting => "starting",
        VmState::Running => "running",
        VmState::Frozen => "frozen",
        VmState::Paused => "paused",
        VmState::Stalled => "stalled",
        VmState::Exited => "exited",
        VmState::Failed => "failed",
    }
}

pub(crate) fn render_table(header: &[&str], rows: Vec<Vec<Field>>, color: bool) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    if color {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    let figures: Vec<bool> = (0..header.len())
        .map(|i| rows.iter().any(|row| matches!(row.get(i), Some(Field::Figure(_)))))
        .collect();
    let align = |cell: Cell, i: usize| {
        let figure = figures.get(i).copied().unwrap_or_default();
        cell.set_alignment(if figure { CellAlignment::Right } else { CellAlignment::Left })
    };
    table.set_header(header.iter().enumerate().map(|(i, name)| align(Cell::new(name), i)));
    for row in rows {
        table.add_row(row.into_iter().enumerate().map(|(i, field)| {
            let cell = match field {
                Field::Text(text) | Field::Figure(text) => Cell::new(text),
                Field::State(state) => Tone::of(state).paint(Cell::new(state_word(state))),
                Field::Toned(text, tone) => tone.paint(Cell::new(text)),
            };
            align(cell, i)
        }));
    }
    for (i, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if i == 0 { 0 } else { 1 }, 1));
    }
    let mut text = String::new();
    for line in table.lines() {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Vec<Field>> {
        [("web", VmState::Running, "38 MiB"), ("web.10", VmState::Failed, "1.5 GiB")]
            .into_iter()
            .map(|(name, state, size)| {
                vec![
                    Field::Text(name.to_owned()),
                    Field::State(state),
                    Field::Figure(size.to_owned()),
                ]
            })
            .collect()
    }

    #[test]
    fn tables_line_up_and_leave_no_trailing_blanks() {
        assert_eq!(
            render_table(&["VM", "STATE", "PRIVATE"], rows(), false),
            "VM      STATE    PRIVATE\n\
             web     running   38 MiB\n\
             web.10  failed   1.5 GiB\n"
        );
    }

    #[test]
    fn colour_is_all_that_a_terminal_adds() {
        let colored = render_table(&["VM", "STATE", "PRIVATE"], rows(), true);
        assert!(colored.contains("\x1b["), "{colored:?}");
        let mut plain = String::new();
        let mut rest = colored.as_str();
        while let Some(at) = rest.find("\x1b[") {
            plain.push_str(&rest[..at]);
            rest = &rest[at + rest[at..].find('m').expect("a colour ends with m") + 1..];
        }
        plain.push_str(rest);
        assert_eq!(plain, render_table(&["VM", "STATE", "PRIVATE"], rows(), false));
    }

    #[test]
    fn a_document_carries_the_schema_beside_its_fields() {
        let value = serde_json::json!({ "vms": [] });
        let text = serde_json::to_string(&Schema { schema: SCHEMA, value: &value }).unwrap();
        assert_eq!(text, r#"{"schema":"vmfork/1","vms":[]}"#);
    }
}
