//! The figures of the papers that can be played here, with published values beside ours where a
//! paper's text gives them.
//!
//! Those of SDR-RDMA (SC 2025): from its model 3, 9, 10, 12 and 13; 11, whose left part is measured
//! on this machine, and 14, 15 and 16, which are. Its loss can be read as that of a packet or of a
//! chunk, so those of the model are drawn both ways. Each figure is an SVG file; what the text
//! gives is compared in a table and in `sdr.json`. Those of SHIFT: see [`shift`]; of THORN-ML,
//! R²CCL and APM: [`measured`].

mod codes;
mod drawing;
mod grids;
mod lines;
mod measured;
mod sdk;
mod setting;
mod shift;

use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Instant;

use unbroken_chart::Figure;

use crate::Result;
use drawing::{Drawing, Published};
use measured::{Drawings, Paper};
pub use shift::Tools;

type Draw = fn() -> Result<Drawing>;

const FIGURES: [(u32, Draw); 9] = [
    (3, lines::figure_3),
    (9, grids::figure_9),
    (10, lines::figure_10),
    (11, codes::figure_11),
    (12, lines::figure_12),
    (13, grids::figure_13),
    (14, sdk::figure_14),
    (15, sdk::figure_15),
    (16, sdk::figure_16),
];

/// Those of them that are measured here: what is drawn is kept beside the picture.
const MEASURED: [u32; 4] = [11, 14, 15, 16];

/// The names of all figures, which `--only` takes besides those of their papers.
fn names() -> Vec<String> {
    let sdr = FIGURES.iter().map(|(number, _)| format!("sdr-{number}"));
    let shift = shift::FIGURES.iter().map(|(number, _)| format!("shift-{number}"));
    sdr.chain(shift).chain(measured::PAPERS.iter().flat_map(measured::Paper::figures)).collect()
}

/// The names that are asked for.
fn wanted(only: &[String]) -> Result<HashSet<String>> {
    let (all, mut found) = (names(), HashSet::new());
    for asked in only {
        let of_paper = format!("{asked}-");
        let meant: Vec<&String> =
            all.iter().filter(|name| *name == asked || name.starts_with(&of_paper)).collect();
        if meant.is_empty() {
            let known = all.join(", ");
            return Err(format!(
                "figure '{asked}' is not drawn here; {known} are, and sdr, shift, edge, coll and \
                 apm are all of a paper"
            )
            .into());
        }
        found.extend(meant.into_iter().cloned());
    }
    Ok(if only.is_empty() { all.into_iter().collect() } else { found })
}

/// The name of a figure as files have it: numbers in it have two digits, so that they are in order.
fn padded(name: &str) -> String {
    name.split('-').map(|part| format!("{part:0>2}")).collect::<Vec<_>>().join("-")
}

/// Where figures go.
struct Folder<'a>(&'a Path);

impl Folder<'_> {
    fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.0.join(name);
        std::fs::write(&path, text)
            .map_err(|e| format!("cannot write {}: {e}", path.display()).into())
    }

    fn draw(&self, name: &str, figure: &Figure, began: Instant) -> Result<()> {
        self.write(name, &figure.svg()?)?;
        println!("{}  {:.1} s", self.0.join(name).display(), began.elapsed().as_secs_f64());
        Ok(())
    }
}

impl Folder<'_> {
    /// Keeps what was measured for a figure, so that it can be drawn again.
    fn keep(&self, paper: &str, name: &str, figure: Figure, rows: Vec<shift::Row>) -> Result<()> {
        let drawings = Drawings { figures: vec![(name.to_string(), figure)], rows };
        let text = serde_json::to_string_pretty(&drawings)? + "\n";
        self.write(&format!("{paper}-{name}.json"), &text)
    }
}

impl Folder<'_> {
    /// Puts what is published of some figures in the place of what `sdr.json` says of them.
    fn replace_published(&self, new: Vec<Published>) -> Result<()> {
        let path = self.0.join("sdr.json");
        let mut all: Vec<Published> = match std::fs::read_to_string(&path) {
            Ok(text) => {
                serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?
            }
            Err(e) if e.kind() == ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(format!("cannot read {}: {e}", path.display()).into()),
        };
        all.retain(|old| new.iter().all(|new| new.figure != old.figure));
        all.extend(new);
        all.sort_by_key(|row| row.figure);
        self.write("sdr.json", &(serde_json::to_string_pretty(&all)? + "\n"))
    }

    /// Writes the rows of all of SHIFT's figures that are kept here into `shift.json`.
    fn gather_rows(&self) -> Result<()> {
        let mut rows = Vec::new();
        for (number, _) in shift::FIGURES {
            let path = self.0.join(format!("shift-{}.json", padded(number)));
            if path.exists() {
                rows.extend(measured::read(&path)?.map_or(Vec::new(), |kept| kept.rows));
            }
        }
        self.write("shift.json", &(serde_json::to_string_pretty(&rows)? + "\n"))
    }
}

/// Draws all that was measured before again, from the files beside the pictures.
pub fn redraw(out: &Path) -> Result<()> {
    let folder = Folder(out);
    let files =
        std::fs::read_dir(out).map_err(|e| format!("cannot list {}: {e}", out.display()))?;
    let mut files = files.map(|file| Ok(file?.path())).collect::<Result<Vec<_>>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    for file in &files {
        let began = Instant::now();
        let Some(drawings) = measured::read(file)? else { continue };
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        let (paper, _) = stem.split_once('-').unwrap_or((&stem, ""));
        for (name, figure) in drawings.figures {
            folder.draw(&format!("{paper}-{name}.svg"), &figure, began)?;
        }
    }
    Ok(())
}

/// Draws all figures, or those of some names, into a folder, and prints the tables.
pub fn draw(out: &Path, only: &[String], tools: &Tools) -> Result<()> {
    let wanted = wanted(only)?;
    std::fs::create_dir_all(out).map_err(|e| format!("cannot make {}: {e}", out.display()))?;
    let folder = Folder(out);
    let mut published = Vec::new();
    for (number, draw) in FIGURES.iter().filter(|(n, _)| wanted.contains(&format!("sdr-{n}"))) {
        let began = Instant::now();
        let drawing = draw()?;
        folder.draw(&format!("sdr-{number:02}.svg"), &drawing.figure, began)?;
        if MEASURED.contains(number) {
            folder.keep("sdr", &format!("{number:02}"), drawing.figure, Vec::new())?;
        }
        published.extend(drawing.published);
    }
    let mut rows = Vec::new();
    for (number, draw) in
        shift::FIGURES.iter().filter(|(n, _)| wanted.contains(&format!("shift-{n}")))
    {
        if only.is_empty() && *number == shift::TRAINING && tools.training.is_none() {
            println!("SHIFT's figure {number} is left out: {}", shift::NO_TORCH);
            continue;
        }
        let began = Instant::now();
        let drawing = draw(tools).map_err(|e| format!("SHIFT's figure {number}: {e}"))?;
        let name = padded(number);
        folder.draw(&format!("shift-{name}.svg"), &drawing.figure, began)?;
        folder.keep("shift", &name, drawing.figure, drawing.rows.clone())?;
        rows.extend(drawing.rows);
    }
    for paper in &measured::PAPERS {
        for (name, _) in
            paper.names.iter().zip(paper.figures()).filter(|(_, figure)| wanted.contains(figure))
        {
            measured_figures(&folder, paper, name, tools)?;
        }
    }
    if !published.is_empty() {
        println!("\n{}", table(&published));
    }
    if !rows.is_empty() {
        println!("\n{}", shift::table(&rows));
    }
    if !published.is_empty() {
        folder.replace_published(published)?;
    }
    if !rows.is_empty() {
        folder.gather_rows()?;
    }
    Ok(())
}

/// Measures and draws what belongs together, and prints its table.
fn measured_figures(folder: &Folder, paper: &Paper, name: &str, tools: &Tools) -> Result<()> {
    let began = Instant::now();
    let file = folder.0.join(format!("{}-{}.json", paper.prefix, padded(name)));
    let Some(drawings) = measured::measure(paper, name, &file, tools)? else { return Ok(()) };
    for (file, picture) in drawings.figures {
        folder.draw(&format!("{}-{file}.svg", paper.prefix), &picture, began)?;
    }
    println!("\n{}", shift::table(&drawings.rows));
    Ok(())
}

fn table(published: &[Published]) -> String {
    let head = "| figure | what | published | ours, loss of packets | ours, loss of chunks |\n| \
                --- | --- | --- | --- | --- |\n";
    let row = |p: &Published| {
        format!(
            "| {} | {} | {} | {} | {} |\n",
            p.figure, p.what, p.published, p.per_packet, p.per_chunk
        )
    };
    head.to_string() + &published.iter().map(row).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_tools() -> Tools {
        Tools { unbroken: "unbroken".into(), programs: "programs".into(), training: None }
    }

    fn only(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| name.to_string()).collect()
    }

    #[test]
    fn figures_are_files() {
        let dir = tempfile::tempdir().unwrap();
        draw(dir.path(), &only(&["sdr-3", "sdr-9", "sdr-10", "sdr-12"]), &no_tools()).unwrap();
        for name in ["sdr-03.svg", "sdr-09.svg", "sdr-10.svg", "sdr-12.svg"] {
            let svg = std::fs::read_to_string(dir.path().join(name)).unwrap();
            assert!(
                svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && !svg.contains("NaN"),
                "{name}"
            );
            assert!(
                svg.contains("loss of packets") && svg.contains("loss of chunks"),
                "{name}: both readings"
            );
        }
    }

    /// What is drawn alone says anew what is published of it, and leaves the rest as it is.
    #[test]
    fn rows_of_a_figure_are_replaced_by_those_of_its_next_drawing() {
        let dir = tempfile::tempdir().unwrap();
        let row = |figure, what: &str| {
            let [published, per_packet, per_chunk] = ["1x", "2x", "3x"].map(String::from);
            Published { figure, what: what.into(), published, per_packet, per_chunk }
        };
        let folder = Folder(dir.path());
        let of = |names: &[(u32, &str)]| names.iter().map(|(n, what)| row(*n, what)).collect();
        folder.replace_published(of(&[(3, "a"), (10, "b"), (10, "c"), (11, "d")])).unwrap();
        folder.replace_published(of(&[(10, "e")])).unwrap();
        let text = std::fs::read_to_string(dir.path().join("sdr.json")).unwrap();
        let all: Vec<Published> = serde_json::from_str(&text).unwrap();
        let what: Vec<_> = all.iter().map(|row| (row.figure, row.what.as_str())).collect();
        assert_eq!(what, [(3, "a"), (10, "e"), (11, "d")]);
    }

    #[test]
    fn figures_are_asked_for_by_name_or_by_paper() {
        assert_eq!(wanted(&only(&["shift-7"])).unwrap(), HashSet::from(["shift-7".to_string()]));
        assert_eq!(wanted(&only(&["shift", "shift-9"])).unwrap().len(), 5);
        assert_eq!(wanted(&only(&["edge"])).unwrap().len(), 4);
        assert_eq!(
            wanted(&only(&["coll"])).unwrap(),
            HashSet::from(
                ["7", "8", "9", "10", "11", "12", "13", "14", "15", "16"]
                    .map(|n| format!("coll-{n}"))
            )
        );
        assert_eq!(wanted(&only(&["apm"])).unwrap().len(), 8);
        assert_eq!(wanted(&[]).unwrap().len(), FIGURES.len() + shift::FIGURES.len() + 22);
        let error = wanted(&only(&["shift-1"])).unwrap_err().to_string();
        assert!(error.starts_with("figure 'shift-1' is not drawn here; sdr-3, "), "{error}");
        assert_eq!([padded("7"), padded("table2")], ["07", "table2"]);
    }

    /// A picture and what it was drawn from have the same name, where that is a number.
    #[test]
    fn pictures_and_what_they_are_drawn_from_have_one_name() {
        assert_eq!(["7", "5-6", "15", "outage"].map(padded), ["07", "05-06", "15", "outage"]);
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/figures");
        for paper in &measured::PAPERS {
            for name in paper.names {
                let path = folder.join(format!("{}-{}.json", paper.prefix, padded(name)));
                let drawings = measured::read(&path).unwrap().expect("figures");
                for (drawn, _) in &drawings.figures {
                    let picture = folder.join(format!("{}-{drawn}.svg", paper.prefix));
                    assert!(picture.is_file(), "{}", picture.display());
                    let numbered = name.starts_with(|c: char| c.is_ascii_digit());
                    assert!(!numbered || *drawn == padded(name), "{drawn} of {name}");
                }
            }
        }
    }

    /// What is kept of a figure gives the same picture.
    #[test]
    fn figures_are_drawn_again_from_what_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder(dir.path());
        let figure = Figure { title: "kept".into(), ..Figure::default() };
        let picture = dir.path().join("sdr-07.svg");
        folder.draw("sdr-07.svg", &figure, Instant::now()).unwrap();
        let drawn = std::fs::read_to_string(&picture).unwrap();
        folder.keep("sdr", "07", figure, Vec::new()).unwrap();
        folder.write("sdr.json", "[]").unwrap();
        std::fs::remove_file(&picture).unwrap();
        redraw(dir.path()).unwrap();
        assert_eq!(std::fs::read_to_string(&picture).unwrap(), drawn);
    }

    #[test]
    fn what_is_missing_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = |name| draw(dir.path(), &only(&[name]), &no_tools()).unwrap_err().to_string();
        assert!(error("shift-9").contains("programs/verbs is missing"));
        assert!(error("shift-10").contains("make test-torch"));
    }
}
