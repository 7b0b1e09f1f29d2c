//! Text for people: tables on standard output, notes and progress on standard error.

use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use comfy_table::{Cell, CellAlignment, LineStyle, Table, TableStyle};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// Writes text to standard output. A reader that has gone away (`moe4 … | head`) is no failure.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.context("cannot write to standard output"),
    }
}

/// Tells on standard error, in one line, what a reader of the results would not expect.
pub(crate) fn note(text: &str) {
    // Nobody is left to be told if standard error is closed.
    io::stderr().write_all(format!("note: {text}\n").as_bytes()).ok();
}

/// A table with these column heads; the first `left` columns hold text, the others numbers.
pub(crate) fn table(heads: &[&str], left: usize, rows: Vec<Vec<String>>) -> String {
    let align = |column: usize| if column < left { CellAlignment::Left } else { CellAlignment::Right };
    let cells = |texts: Vec<String>| {
        let aligned = |(column, text)| Cell::new(text).set_alignment(align(column));
        texts.into_iter().enumerate().map(aligned).collect::<Vec<_>>()
    };
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─')));
    table.set_header(cells(heads.iter().map(|head| (*head).to_owned()).collect()));
    for row in rows {
        table.add_row(cells(row));
    }
    format!("{}\n", table.trim_fmt())
}

/// Becomes true with Ctrl-C, which would otherwise leave a file half written.
pub(crate) fn interrupt_flag() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let setter = Arc::clone(&flag);
    ctrlc::set_handler(move || setter.store(true, Ordering::Relaxed)).context("cannot listen for Ctrl-C")?;
    Ok(flag)
}

/// Bars that show at the same time have to know of each other.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

fn shown(bar: ProgressBar, template: &str) -> ProgressBar {
    let bar = match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    };
    BARS.add(bar)
}

/// A progress bar that shows only on a terminal, over `length` bytes.
pub(crate) fn byte_progress(length: u64) -> ProgressBar {
    shown(ProgressBar::new(length), "{wide_bar} {bytes}/{total_bytes} {eta} {msg}")
}

/// A progress bar that shows only on a terminal, over `length` steps.
pub(crate) fn step_progress(what: &'static str, length: u64) -> ProgressBar {
    shown(ProgressBar::new(length).with_message(what), "{msg} {wide_bar} {pos}/{len} {eta}")
}

/// A word about work of unknown length that shows only on a terminal, until it is finished.
pub(crate) fn spinner(message: String) -> ProgressBar {
    let bar = shown(ProgressBar::new_spinner().with_message(message), "{spinner} {wide_msg} {elapsed}");
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// `[128, 64]`.
pub(crate) fn shape(dims: &[usize]) -> String {
    format!("{dims:?}")
}

/// A command reads its input while it writes, and nobody wants to lose a capture to a mistyped name.
pub(crate) fn refuse_same_file(input: &Path, output: &Path) -> Result<()> {
    let same = match (std::fs::canonicalize(input), std::fs::canonicalize(output)) {
        (Ok(input), Ok(output)) => input == output || same_inode(&input, &output),
        _ => false,
    };
    if same {
        bail!("input and output are the same file, {}; choose another output name", input.display());
    }
    Ok(())
}

/// Hard links are two names of one file.
#[cfg(unix)]
fn same_inode(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;

    let identity = |path: &Path| std::fs::metadata(path).map(|status| (status.dev(), status.ino()));
    matches!((identity(a), identity(b)), (Ok(a), Ok(b)) if a == b)
}

#[cfg(not(unix))]
fn same_inode(_: &Path, _: &Path) -> bool {
    false
}

/// A number as short as it can be told exactly.
pub(crate) fn number(value: f32) -> String {
    let plain = value == 0.0 || (1e-3..1e6).contains(&value.abs());
    if plain { value.to_string() } else { format!("{value:e}") }
}
