//! `docs`: what pages of the reference say of things that the code declares in one place.
//!
//! A page has such a part between two markers: `<!-- declared: NAME -->` and `<!-- /declared -->`.
//! A schema has it between the first field of the declaration and the first one behind it.

use std::fmt::Write;
use std::fs;
use std::ops::Range;

use unbroken_events::NIC_COUNTERS;

use crate::workspace;

/// A part of a page: where it begins and ends, and what stands between.
struct Part {
    page: &'static str,
    /// What stands before it.
    begin: String,
    /// What stands behind it.
    end: &'static str,
    text: String,
}

impl Part {
    /// Where the part lies in its page.
    fn place(&self, text: &str) -> Result<Range<usize>, String> {
        let missing = |what: &str| format!("{}: it has no `{}`", self.page, what.trim());
        let start = text.find(&self.begin).ok_or_else(|| missing(&self.begin))? + self.begin.len();
        let length = text[start..].find(self.end).ok_or_else(|| missing(self.end))?;
        Ok(start..start + length)
    }
}

/// Compares the pages with the declarations, or writes the parts that differ. Gives how many parts
/// there are, and the pages that were written.
pub fn check(write: bool) -> Result<(usize, Vec<&'static str>), String> {
    let parts = parts();
    let mut written = Vec::new();
    for part in &parts {
        let path = workspace::root().join(part.page);
        let read = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", part.page))?;
        let place = part.place(&read)?;
        if read[place.clone()] == part.text {
            continue;
        }
        if !write {
            return Err(format!(
                "{} differs from what the code declares: `cargo xtask docs --write` renews it",
                part.page
            ));
        }
        let text = [&read[..place.start], &part.text, &read[place.end..]].concat();
        fs::write(&path, text).map_err(|e| format!("{}: {e}", part.page))?;
        written.push(part.page);
    }
    Ok((parts.len(), written))
}

fn parts() -> Vec<Part> {
    vec![counter_table(), counter_fields(), required_counters()]
}

/// Counters of a NIC that `unbroken status` shows.
fn counter_table() -> Part {
    let mut text = String::from(
        "\n| counter of a NIC in `status` | in JSON | in `metrics` | meaning |\n\
         | --- | --- | --- | --- |\n",
    );
    for counter in NIC_COUNTERS {
        let Some(column) = counter.column else { continue };
        let metric = counter.metric.map_or(String::new(), |metric| format!("`{}`", metric.name));
        let (heading, field, meaning) = (column.heading(), counter.field, counter.meaning);
        // To a string that never fails.
        let _ = writeln!(text, "| {heading} | `{field}` | {metric} | {meaning} |");
    }
    Part {
        page: "docs/reference/cli.md",
        begin: "<!-- declared: counters of a NIC -->\n".into(),
        end: "\n<!-- /declared -->",
        text,
    }
}

const SCHEMA: &str = "docs/reference/schemas/status.schema.json";

/// Their fields in the schema.
fn counter_fields() -> Part {
    let field = |counter: &unbroken_events::Counter| {
        format!(
            "    \"{}\": {{\n     \"type\": \"integer\",\n     \"minimum\": 0,\n     \
             \"description\": \"{}\"\n    }},\n",
            counter.field, counter.meaning
        )
    };
    Part {
        page: SCHEMA,
        begin: "where it is no device of the machine.\"\n    },\n".into(),
        end: "    \"last_data_rx_us\": {",
        text: NIC_COUNTERS.iter().map(field).collect(),
    }
}

/// And their names among those that each NIC has.
fn required_counters() -> Part {
    Part {
        page: SCHEMA,
        begin: "    \"registered_bytes\",\n".into(),
        end: "    \"last_data_rx_us\"\n",
        text: NIC_COUNTERS.iter().map(|c| format!("    \"{}\",\n", c.field)).collect(),
    }
}
