//! The figures of the papers that can be played here, with published values beside ours where a paper's text gives them.
//!
//! Those of SDR-RDMA (SC 2025): from its model 3, 9, 10, 12 and 13; 11, whose left part is measured on this machine, and 14, 15 and 16, which are. Its
//! loss can be read as that of a packet or of a chunk, so those of the model are drawn both ways. Each figure is an SVG file; what the text gives
//! is compared in a table and in `sdr.json`.

mod codes;
mod grids;
mod lines;
mod sdk;
mod setting;

use std::path::Path;
use std::time::Instant;

use serde::Serialize;
use unbroken_chart::Figure;

use crate::Result;

/// A value that the paper's text gives, and ours.
#[derive(Clone, Debug, Serialize)]
pub struct Published {
    /// The figure it belongs to.
    figure: u32,
    /// What it is.
    what: String,
    /// As the paper has it.
    published: String,
    /// With its loss read as that of a packet.
    per_packet: String,
    /// With its loss read as that of a chunk.
    per_chunk: String,
}

/// A figure and what is published of it.
struct Drawing {
    figure: Figure,
    published: Vec<Published>,
}

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

/// Draws all figures, or those of some numbers, into a folder, and prints the table.
pub fn draw(out: &Path, only: &[u32]) -> Result<()> {
    if let Some(wrong) = only.iter().find(|number| !FIGURES.iter().any(|(n, _)| n == *number)) {
        let known: Vec<String> = FIGURES.iter().map(|(n, _)| n.to_string()).collect();
        return Err(format!("figure {wrong} is not drawn here; {} are", known.join(", ")).into());
    }
    std::fs::create_dir_all(out).map_err(|e| format!("cannot make {}: {e}", out.display()))?;
    let write = |name: &str, text: &str| {
        let path = out.join(name);
        std::fs::write(&path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))
    };
    let mut published = Vec::new();
    for (number, draw) in FIGURES.iter().filter(|(n, _)| only.is_empty() || only.contains(n)) {
        let began = Instant::now();
        let drawing = draw()?;
        let name = format!("sdr-{number:02}.svg");
        write(&name, &drawing.figure.svg())?;
        println!("{}  {:.1} s", out.join(name).display(), began.elapsed().as_secs_f64());
        published.extend(drawing.published);
    }
    if only.is_empty() {
        write("sdr.json", &(serde_json::to_string_pretty(&published)? + "\n"))?;
    }
    println!("\n{}", table(&published));
    Ok(())
}

fn table(published: &[Published]) -> String {
    let head = "| figure | what | published | ours, loss of packets | ours, loss of chunks |\n| --- | --- | --- | --- | --- |\n";
    let row = |p: &Published| {
        format!("| {} | {} | {} | {} | {} |\n", p.figure, p.what, p.published, p.per_packet, p.per_chunk)
    };
    head.to_string() + &published.iter().map(row).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_files() {
        let dir = tempfile::tempdir().unwrap();
        draw(dir.path(), &[3, 9, 10, 12]).unwrap();
        for name in ["sdr-03.svg", "sdr-09.svg", "sdr-10.svg", "sdr-12.svg"] {
            let svg = std::fs::read_to_string(dir.path().join(name)).unwrap();
            assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{name}");
            assert!(svg.contains("loss of packets") && svg.contains("loss of chunks"), "{name}: both readings");
        }
        let error = draw(dir.path(), &[1]).unwrap_err().to_string();
        assert_eq!(error, "figure 1 is not drawn here; 3, 9, 10, 11, 12, 13, 14, 15, 16 are");
    }
}
