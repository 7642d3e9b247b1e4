//! Files that questions name: clusters and jobs in TOML, and traces.
//!
//! Each table of a TOML file is laid over what is usual for the question that reads it. So one file
//! may be for all questions.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};
use unbroken_simulate::cluster::Cluster;
use unbroken_simulate::failures::{PartRates, Recovery};
use unbroken_simulate::inference::serving::Gpu;
use unbroken_simulate::job::Job;

use crate::{Error, Result};

/// The most bytes of a file.
const MOST_BYTES: u64 = 64 << 20;

/// What a file may have.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(dead_code, reason = "tables are read for what is wrong with them, then taken one by one")]
struct Tables {
    cluster: Cluster,
    job: Job,
    recovery: Recovery,
    rates: PartRates,
    serving: Served,
    gpu: Gpu,
}

/// The table `[serving]`.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Served {
    pub model: Option<String>,
    pub disaggregated: bool,
    pub tensor: Option<usize>,
    pub pipeline: Option<usize>,
    pub weight_bytes: Option<f64>,
    pub budget: Option<u32>,
    pub sequences: Option<usize>,
    pub restart_s: Option<f64>,
}

/// The tables of a file; none if there is no file.
#[derive(Default)]
pub(crate) struct Contents {
    tables: Table,
}

impl Contents {
    pub fn read(path: Option<&Path>) -> Result<Contents> {
        let Some(path) = path else { return Ok(Contents::default()) };
        let shown = path.display();
        let wrong = |e: toml::de::Error| {
            Error::value("file", format!("{shown}: {}", e.to_string().trim_end()))
        };
        let text = text("file", path)?;
        // what is wrong is named with its line here
        let _: Tables = toml::from_str(&text).map_err(wrong)?;
        Ok(Contents { tables: toml::from_str(&text).map_err(wrong)? })
    }

    /// Whether a table says something.
    pub fn has(&self, table: &str, key: &str) -> bool {
        self.tables.get(table).and_then(Value::as_table).is_some_and(|t| t.contains_key(key))
    }

    /// A table over what is usual.
    pub fn over<T: Serialize + DeserializeOwned>(&self, table: &str, usual: T) -> Result<T> {
        let Some(given) = self.tables.get(table).and_then(Value::as_table) else {
            return Ok(usual);
        };
        let wrong = |e: &dyn std::fmt::Display| Error::value("file", format!("[{table}]: {e}"));
        let mut all = Table::try_from(usual).map_err(|e| wrong(&e))?;
        all.extend(given.clone());
        Value::Table(all).try_into().map_err(|e| wrong(&e))
    }
}

/// The text of an option's file: a regular one that is not too long.
pub(crate) fn text(option: &str, path: &Path) -> Result<String> {
    unbroken_runtime::read_named(path, MOST_BYTES)
        .map_err(|e| Error::file(option, format!("cannot read {}", path.display()), e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(text: &str) -> Result<Contents> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.toml");
        std::fs::write(&path, text).unwrap();
        Contents::read(Some(&path))
    }

    #[test]
    fn tables_are_laid_over_what_is_usual() {
        let of_file = contents("[cluster]\nnics = 4\n[job]\nmodel = \"mixtral-8x7b\"\n").unwrap();
        let usual = Cluster { nic_mbps: 400_000, ..Cluster::default() };
        let cluster = of_file.over("cluster", usual.clone()).unwrap();
        assert_eq!(cluster, Cluster { nics: 4, ..usual });
        assert!(of_file.has("cluster", "nics") && !of_file.has("cluster", "gpus"));
        let job = of_file.over("job", Job::default()).unwrap();
        assert_eq!((job.model.name.as_str(), job.tensor), ("mixtral-8x7b", 4));
        let rates = of_file.over("rates", PartRates::default()).unwrap();
        assert_eq!(rates, PartRates::default());
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, part) in [
            ("[cluster]\nhost = 16\n", "unknown field `host`"),
            ("\n[jobs]\n", "line 2"),
            ("[job]\nmodel = \"8b\"\n", "there are 1.3b, 2.7b"),
            ("[job]\nmodel = 8\n", "the name of a model, or a table with its numbers"),
            ("[job]\n[job.model]\nname = \"x\"\nlayers = 2\n", "missing field `hidden`"),
            ("[job]\nzero = -1\n", "line 2"),
            ("[rates]\nnic_mtbf = 3\n", "nic_mtbf_s"),
        ] {
            let says = contents(text).err().unwrap().to_string();
            assert!(says.contains(part) && says.contains("x.toml: "), "{text:?}: {says}");
        }
    }

    #[test]
    fn what_has_no_end_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        for path in [Path::new("/dev/zero"), &fifo] {
            let says = text("trace", path).err().unwrap().to_string();
            assert!(says.contains(&format!("{}: it is not a regular", path.display())), "{says}");
        }
        let long = dir.path().join("long");
        std::fs::File::create(&long).unwrap().set_len(MOST_BYTES + 1).unwrap();
        let says = text("trace", &long).err().unwrap().to_string();
        assert!(says.contains("up to 64 MiB are right"), "{says}");
    }
}
