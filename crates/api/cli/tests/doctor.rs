//! `unbroken doctor` as a user calls it, also on a machine without RDMA devices.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn doctor(args: &[&str], directory: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    Command::new(env!("CARGO_BIN_EXE_unbroken"))
        .args([&["doctor"], args].concat())
        .env("UNBROKEN_RUNTIME", folder.path().join("not-yet"))
        .env("UNBROKEN_DIRECTORY", directory)
        .env_remove("UNBROKEN_DEVICES")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_machine_without_devices_is_told_so_without_errors() {
    if Path::new("/sys/class/infiniband").exists() {
        eprintln!("skipped: this machine has RDMA devices");
        return;
    }
    for args in [&[][..], &["--devices", "all"], &["--devices", "mlx5_0,mlx5_1"]] {
        let output = doctor(args, "");
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert_eq!(text(&output.stderr), "", "{args:?}");
        let said = text(&output.stdout);
        assert!(said.contains("PROBLEM  devices: the kernel shows no RDMA device"), "{said}");
        assert!(said.contains("rdma link add rxe0") && said.contains("unbroken demo"), "{said}");
    }
}

#[test]
fn json_names_each_problem_with_what_to_do() {
    let output = doctor(&["--json"], "redis://127.0.0.1:1");
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(1), String::new()));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let lines = report["lines"].as_array().unwrap();
    let problems: Vec<&Value> = lines.iter().filter(|line| line["level"] == "problem").collect();
    assert_eq!(report["problems"], problems.len());
    assert!(problems.iter().all(|line| line["do"].is_string()), "{report}");
    let directory = problems.iter().find(|line| line["check"] == "directory").unwrap();
    assert!(directory["text"].as_str().unwrap().contains("127.0.0.1:1"), "{directory}");
}

#[test]
fn a_runtime_folder_that_is_not_there_is_no_problem_and_is_not_made() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("later");
    let output = doctor(&["--json", "--runtime", place.to_str().unwrap()], "");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let lines = report["lines"].as_array().unwrap();
    let directory = lines.iter().find(|line| line["check"] == "directory").unwrap();
    assert_eq!(directory["level"], "note", "{directory}");
    assert!(directory["text"].as_str().unwrap().contains("later"), "{directory}");
    assert!(!place.exists());
}

#[test]
fn a_wrong_command_line_ends_with_2() {
    for args in [&["--devices", "a,a"][..], &["--devices", ""], &["--no-such-option"]] {
        let output = doctor(args, "");
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{args:?}");
        assert!(!output.stderr.is_empty());
    }
}
