//! `unbroken model` as somebody calls it who knows nothing: one screen, one picture, and sentences.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const LINK: [&str; 4] = ["--bandwidth", "400G", "--distance", "3750km"];
const MESSAGE: [&str; 4] = ["--loss", "1e-5", "--size", "128M"];

/// The command in a folder of its own, whose runtime folder cannot be made: it needs none.
fn model(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_unbroken"));
    command
        .arg("model")
        .args(args)
        .current_dir(folder)
        .env("UNBROKEN_RUNTIME", "/proc/none")
        .output()
        .unwrap()
}

fn good(folder: &Path, args: &[&str]) -> String {
    let output = model(folder, args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Exit status 1 or 2 and what stderr says.
fn bad(folder: &Path, args: &[&str], status: i32) -> String {
    let output = model(folder, args);
    assert_eq!(output.status.code(), Some(status), "{args:?}");
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).unwrap()
}

fn json(folder: &Path, args: &[&str]) -> Value {
    let text = good(folder, args);
    assert_eq!(text.lines().count(), 1);
    serde_json::from_str(&text).unwrap()
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn one_screen_and_one_picture() {
    let dir = tempfile::tempdir().unwrap();
    let text = good(dir.path(), &[LINK, MESSAGE].concat());
    assert!(
        text.lines().count() <= 24 && text.lines().all(|line| line.chars().count() <= 120),
        "{text}"
    );
    for words in ["25.0 ms", "2048 chunks", "use      EC-MDS", "48.3 ms", "picture  model.svg"] {
        assert!(text.contains(words), "'{words}' is not in: {text}");
    }
    let files: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|f| f.unwrap().file_name()).collect();
    assert_eq!(files, ["model.svg"]);
    let svg = std::fs::read_to_string(dir.path().join("model.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && !svg.contains("NaN"));
    for words in ["SR-RTO", "EC-XOR(32, 8)", "over the distance", "128 MiB"] {
        assert!(svg.contains(words), "'{words}' is not in the picture");
    }
}

#[test]
fn the_answer_for_programs_is_stable() {
    let dir = tempfile::tempdir().unwrap();
    let answer = json(dir.path(), &[&LINK[..], &MESSAGE, &["--json", "--no-picture"]].concat());
    let fields = [
        "bandwidth_bps",
        "chunk_bytes",
        "chunk_loss",
        "chunks",
        "ideal_s",
        "message_bytes",
        "objective",
        "picture",
        "recommended",
        "rtt_s",
        "schemes",
    ];
    assert_eq!(keys(&answer), fields);
    let of_scheme = [
        "code_id",
        "fallback",
        "goodput_bps",
        "mean_s",
        "p50_s",
        "p999_s",
        "p99_s",
        "parity",
        "scheme",
    ];
    let schemes = answer["schemes"].as_array().unwrap();
    assert!(schemes.iter().all(|scheme| keys(scheme) == of_scheme) && schemes.len() == 10);
    let mean = |name: &str| {
        schemes.iter().find(|s| s["scheme"] == name).unwrap()["mean_s"].as_f64().unwrap()
    };
    assert!(
        (mean("SR-RTO") - 0.0483).abs() < 1e-4 && (mean("EC-MDS(32, 8)") - 0.0284).abs() < 1e-4
    );
    assert_eq!((&answer["chunks"], &answer["picture"]), (&2048.into(), &Value::Null));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// The objective decides: on a link without losses to speak of, code or not; the loss is of packets
/// unless it is said to be of chunks.
#[test]
fn what_is_asked_for_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let recommended = |args: &[&str]| {
        let args = [&LINK[..], &["--json", "--no-picture"], args].concat();
        json(dir.path(), &args)["recommended"].as_str().unwrap().to_string()
    };
    assert_eq!(recommended(&["--loss", "1e-8", "--size", "8G"]), "SR-NACK");
    assert_eq!(recommended(&["--loss", "0", "--size", "128M", "--objective", "p99.9"]), "SR-NACK");
    assert_eq!(recommended(&["--loss", "1e-7", "--size", "128M"]), "SR-NACK");
    assert!(recommended(&["--loss", "1e-7", "--size", "128M", "--objective", "p99.99"])
        .starts_with("EC-"));
    let loss = |args: &[&str]| {
        json(dir.path(), &[&LINK[..], &MESSAGE, &["--json", "--no-picture"], args].concat())
            ["chunk_loss"]
            .as_f64()
            .unwrap()
    };
    assert_eq!(loss(&["--loss-of", "chunk"]), 1e-5);
    assert!((loss(&["--mtu", "1K"]) / 64e-5 - 1.0).abs() < 1e-3);
    let text =
        good(dir.path(), &[&LINK[..], &["--loss", "1%", "--size", "8G", "--no-picture"]].concat());
    assert!(text.contains("lower bounds"), "{text}");
}

#[test]
fn one_scheme_is_predicted() {
    let dir = tempfile::tempdir().unwrap();
    let args =
        [&["predict", "mds:32,8"], &LINK[..], &["--loss", "2e-3", "--size", "128M", "--ring", "4"]]
            .concat();
    let text = good(dir.path(), &args);
    assert!(text.contains("99.999%") && text.contains("4 datacentres, 6 rounds"), "{text}");
    let answer = json(dir.path(), &[&args[..], &["--json", "--picture", "of.svg"]].concat());
    assert_eq!(
        (keys(&answer), &answer["picture"]),
        (vec!["picture", "quantiles", "ring", "write"], &"of.svg".into())
    );
    assert!(
        answer["ring"]["mean_s"].as_f64().unwrap()
            >= 0.999 * answer["ring"]["least_mean_s"].as_f64().unwrap()
    );
    assert!(dir.path().join("of.svg").exists());
    let quantiles = answer["quantiles"].as_array().unwrap();
    assert!(quantiles.windows(2).all(|two| two[0]["time_s"].as_f64() <= two[1]["time_s"].as_f64()));
}

#[test]
fn heat_maps_have_a_cell_for_each_pair() {
    let dir = tempfile::tempdir().unwrap();
    let answer = json(dir.path(), &[&["heatmap"], &LINK[..], &["--json"]].concat());
    let rows = answer["speedup"].as_array().unwrap();
    let count = |name: &str| answer[name].as_array().unwrap().len();
    assert!(
        rows.len() == count("sizes_bytes")
            && rows.iter().all(|r| r.as_array().unwrap().len() == count("losses"))
    );
    // 128 MiB at 10^-3 a packet: the middle of the red.
    assert!(rows[5][5].as_f64().unwrap() > 4.0, "{}", rows[5]);
    let text = good(
        dir.path(),
        &[&["heatmap", "--scheme", "xor:32,8", "--against", "sr-nack"], &LINK[..]].concat(),
    );
    assert!(text.contains("SR-NACK over EC-XOR(32, 8)") && text.lines().count() < 24, "{text}");
    assert!(std::fs::read_to_string(dir.path().join("model.svg")).unwrap().contains("<rect"));
}

#[test]
fn what_is_wrong_gets_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let with = |link: [&str; 4], message: [&str; 4], status, sentence: &str| {
        let told = bad(dir.path(), &[link, message].concat(), status);
        assert!(told.contains(sentence), "'{sentence}' is not in: {told}");
    };
    with(
        ["--bandwidth", "50GB/s", "--distance", "3750km"],
        MESSAGE,
        2,
        "a bandwidth is in bits a second here: 400G",
    );
    with(
        ["--bandwidth", "400G", "--distance", "25ms"],
        MESSAGE,
        2,
        "a round trip is given so: --rtt 25ms",
    );
    with(
        ["--bandwidth", "400G", "--distance", "3750"],
        MESSAGE,
        2,
        "a distance is written such as 3750km",
    );
    with(["--bandwidth", "400G", "--rtt", "25"], MESSAGE, 2, "a time is written such as 25ms");
    with(LINK, ["--loss", "5", "--size", "128M"], 2, "5 percent are 5%");
    with(LINK, ["--loss", "1e-5", "--size", "128Q"], 2, "a size is written such as 128M");
    with(LINK, ["--loss", "50%", "--size", "128M"], 1, "of all chunks would be lost");
    with(LINK, ["--loss", "1e-5", "--size", "100T"], 1, "larger chunks (--chunk), are right");
    let told = bad(dir.path(), &[&LINK[..], &MESSAGE, &["--picture", "a.png"]].concat(), 1);
    assert!(told.contains("'a.svg' is right"), "{told}");
    let told =
        bad(dir.path(), &[&LINK[..], &MESSAGE, &["--picture", "no/such/folder.svg"]].concat(), 1);
    assert!(told.contains("cannot write no/such/folder.svg"), "{told}");
    let told = bad(dir.path(), &[&LINK[..], &MESSAGE, &["--chunk", "5000B"]].concat(), 1);
    assert!(told.contains("a chunk is a multiple of a packet"), "{told}");
    let told = bad(dir.path(), &[&["predict", "tcp"], &LINK[..], &MESSAGE].concat(), 2);
    assert!(told.contains("sr-rto, sr-nack, mds:32,8 and xor:32,8"), "{told}");
    assert!(bad(dir.path(), &[], 2).contains("--bandwidth <RATE>"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
