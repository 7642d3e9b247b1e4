//! `unbroken plan` and `unbroken simulate`, as they are called.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

fn call(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_unbroken"));
    command.args(words).output().expect("the command of this crate")
}

fn said(words: &[&str]) -> String {
    let output = call(words);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{words:?}: {errors}");
    assert_eq!(errors, "", "nobody looks at a terminal");
    String::from_utf8(output.stdout).unwrap()
}

fn json(words: &[&str]) -> serde_json::Value {
    serde_json::from_str(&said(&[words, &["--json"]].concat())).unwrap()
}

/// What it says on stderr, and its exit status.
fn refused(words: &[&str]) -> (String, i32) {
    let output = call(words);
    assert_eq!(output.stdout, b"");
    (String::from_utf8(output.stderr).unwrap(), output.status.code().unwrap())
}

#[test]
fn a_plan_is_one_screen() {
    let text = said(&["plan", "--hosts", "64", "--gpus", "8", "--lost", "1"]);
    assert!(text.lines().count() <= 24, "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    for part in ["all-reduce", "send-recv", "restart", "AdapCC", "HotRepair", "host0/nic0"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// The largest there is.
#[test]
fn thousands_of_gpus_have_all_operations() {
    let plan = json(&["plan", "--hosts", "1024"]);
    assert_eq!(plan["collectives"].as_array().unwrap().len(), 6);
}

#[test]
fn a_plan_says_the_same_in_json() {
    let plan = json(&["plan", "--hosts", "8", "--fail", "host3/nic2", "--size", "256M"]);
    let lost = serde_json::json!([{"host": 3, "nic": 2, "port": null, "left": null}]);
    assert_eq!(plan["lost"], lost);
    let rows = plan["collectives"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    for row in rows {
        let bound = row["bound_us"].as_f64().unwrap();
        for of in row["strategies"].as_array().unwrap() {
            assert!(of["us"].as_f64().unwrap() >= bound * 0.999, "{row}");
        }
    }
    let step = |name: &str| {
        let all = plan["strategies"].as_array().unwrap();
        all.iter().find(|s| s["strategy"] == name).unwrap()["step_s"].as_f64().unwrap()
    };
    assert!(step("ours") < step("balance") && step("balance") < step("hotrepair"));
}

#[test]
fn what_makes_no_sense_is_named() {
    let names = |words: &[&str], status: i32, part: &str| {
        let (text, code) = refused(words);
        assert!(code == status && text.contains(part), "{words:?}: {code}, {text}");
    };
    names(&["plan", "--hosts", "4", "--fail", "host4/nic0"], 1, "host0 to host3");
    names(&["plan", "--hosts", "4", "--fail", "nic0"], 2, "tor3, rail2, pod1");
    names(&["plan", "--tensor", "3"], 1, "a divisor of 8 (GPUs of a host) is right");
    names(&["plan", "--model", "8b"], 1, "2.7b, 6.7b");
    names(&["plan", "--share", "99%"], 1, "GPUs at their peak give");
    names(&["plan", "--nics", "65"], 1, "1 to 64 are right");
    names(&["plan", "--hosts", "1"], 1, "--hosts 2");
    names(&["plan", "--file", "/nowhere.toml"], 1, "cannot read /nowhere.toml");
    names(&["simulate", "sweep", "--lost", "5-2"], 2, "1-10 are right");
    names(&["simulate", "sweep", "--hosts", "2", "--lost", "17"], 1, "up to 16 are right");
    names(&["simulate", "run", "--fail", "host0/nic0@2h", "--for", "1h"], 1, "a longer --for");
    names(&["simulate", "month", "--mtbf", "1us"], 1, "the number of failures");
    names(&["simulate", "month", "--mtbf", "1h", "--nic-mtbf", "1h"], 2, "cannot be used with");
    names(&["simulate", "month", "--cable-mtbf", "0s"], 1, "failures of a cable is 0; seconds");
    names(&["simulate", "run", "--for", "1h"], 2, "--fail <WHAT@TIME>");
    let run = ["simulate", "run", "--for", "1d", "--fail", "host0/nic0@1h", "--fail"];
    names(&[&run[..], &["host0/nic0@2h"]].concat(), 1, "host0/nic0 is lost already when it fails");
    names(
        &["simulate", "run", "--for", "1h", "--trace", "/nowhere.csv"],
        1,
        "cannot read /nowhere",
    );
    names(&["plan", "--expert-parallel", "8"], 1, "1 is right for a model without experts");
    names(&["plan", "--top-k", "2"], 1, "--experts with --top-k, or a model with experts");
    names(&["plan", "--experts", "8", "--top-k", "9"], 1, "1 to 8 (experts) are right");
    let mixtral = ["plan", "--model", "mixtral-8x7b", "--expert-parallel"];
    names(&[&mixtral[..], &["16"]].concat(), 1, "a divisor of 8 (experts of a layer)");
    names(&["plan", "--context", "3"], 1, "context parallelism is 3; a divisor of 128");
    names(&["plan", "--zero", "4"], 1, "the ZeRO stage is 4; 0 (none) to 3 (FSDP) are right");
    names(&["plan", "--zero", "2", "--pipeline", "2"], 1, "0, 1 or 3 is right with a pipeline");
    names(&["plan", "--zero", "1", "--fsdp"], 2, "cannot be used with");
    names(&["plan", "--interleave", "2"], 1, "1 is right without a pipeline");
    let piped = ["plan", "--pipeline", "4", "--interleave", "2", "--batch", "513"];
    names(&piped, 1, "the batch is 513; a multiple of 128 is right");
    // before anything of that size is made
    names(&["plan", "--lost", "1000000000"], 1, "up to 8 are right");
    names(&["simulate", "serve", "--lost", "1000000000"], 1, "up to 8 are right");
    names(&["simulate", "sweep", "--lost", "1-1000000000"], 1, "up to 512 are right");
    names(&["plan", "--fail", "tor64", "--pod-hosts", "8"], 1, "there are tor0 to tor63");
    names(&["plan", "--fail", "tor0", "--fail", "core=50%"], 1, "three tiers");
    names(
        &["simulate", "run", "--fail", "spine=50%@1h", "--for", "1d"],
        1,
        "`unbroken plan --fail`",
    );
    names(&["plan", "--efficiency", "lots"], 2, "'lots' is no share");
    names(&["plan", "--hosts", "2", "--model", "llama-3.1-405b", "--tensor", "8"], 1, "--hosts ");
    names(&["plan", "--model", "llama-3.1-70b"], 1, "of its 80 may be used: --");
    names(&["plan", "--svg", "x.png"], 1, "'x.svg' is right, not 'x.png'");
    let serve = |words: &[&'static str], status, part| {
        names(&[&["simulate", "serve"], words].concat(), status, part);
    };
    serve(&["--model", "gpt-5"], 1, "llama-3.1-70b, llama-3.1-405b");
    serve(&["--model", "llama-3.1-405b", "--disaggregated"], 1, "weights have 812 GB");
    serve(&["--tensor", "4"], 1, "a multiple of 8 (GPUs of a host) is right");
    serve(&["--pipeline", "1"], 1, "within a host a lost NIC costs nothing");
    serve(&["--rate", "0"], 2, "0.5-4:0.5 are right");
    serve(&["--rate", "1e9"], 1, "the rate of requests is 1000000000");
    serve(&["--prompt", "200000"], 1, "131072 (the model's context) is right");
    serve(&["--strategy", "adapcc"], 2, "restart, reroute, dejavu");
    serve(&["--fail", "host2/nic0"], 1, "host0 to host1");
    serve(&["--at", "100s"], 1, "a longer --for or an earlier --at");
    serve(&["--at-token", "257"], 1, "1 to 256 (the first answer) are right");
    serve(&["--trace", "/nowhere.csv"], 1, "cannot read /nowhere.csv");
    serve(&["--trace", "a.csv", "--rate", "1"], 2, "cannot be used with");
}

#[test]
fn a_file_says_what_options_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.toml");
    let name = path.to_str().unwrap();
    let text = "[cluster]\nhosts = 16\nnic_mbps = 400000\ntiers = 3\npod_hosts = \
                4\ncore_oversubscription = 2.0\n[job]\ntensor = 8\n[recovery]\nswitch_s = 0.005\n";
    std::fs::write(&path, text).unwrap();
    let plan = json(&["plan", "--file", name, "--hosts", "8"]);
    assert_eq!(
        (&plan["cluster"]["hosts"], &plan["cluster"]["nic_mbps"]),
        (&8.into(), &400_000.into())
    );
    assert_eq!((&plan["job"]["tensor"], &plan["recovery"]["switch_s"]), (&8.into(), &0.005.into()));
    std::fs::write(&path, "[cluster]\nhost = 16\n").unwrap();
    let (text, code) = refused(&["plan", "--file", name]);
    assert!(code == 1 && text.contains("unknown field `host`"), "{text}");
}

/// Options or a file: a mixture of experts with sequences that are divided, twice the same.
#[test]
fn jobs_are_options_or_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.toml");
    let name = path.to_str().unwrap();
    let text = "[cluster]\nhosts = 16\n[job]\nmodel = \"mixtral-8x7b\"\ntensor = 2\nzero = 1\n\
                context = 2\ncontext_exchange = \"all-gather\"\nexpert_parallel = 8\n\
                pipeline = 2\ninterleave = 2\nbatch = 512\n";
    std::fs::write(&path, text).unwrap();
    let plan = json(&["plan", "--file", name]);
    let options = "plan --hosts 16 --model mixtral-8x7b --tensor 2 --zero 1 --context 2 \
                   --context-exchange all-gather --expert-parallel 8 --pipeline 2 --interleave 2 \
                   --batch 512";
    assert_eq!(plan, json(&options.split_whitespace().collect::<Vec<_>>()));
    // half of a sequence of 4,096 tokens to two experts: 4,096 elements of two bytes
    let exchanges = plan["exchanges"].as_array().unwrap();
    let of = |purpose: &str| {
        let all = exchanges.iter().filter(|e| e["purpose"] == purpose);
        all.map(|e| (e["kind"].as_str().unwrap(), e["bytes"].as_u64().unwrap())).collect::<Vec<_>>()
    };
    assert_eq!(of("tokens"), [("all-to-all", 2048 * 2 * 4096 * 2)]);
    // keys and values have 1,024 elements each
    let kv = 2 * 4096 * 1024 * 2;
    assert_eq!(of("context"), [("all-gather", kv), ("reduce-scatter", kv)]);
    assert_eq!(of("data").len(), 2);
    assert_eq!(of("expert-data").len(), 2);
    let share = |name: &str| {
        let all = plan["strategies"].as_array().unwrap();
        all.iter().find(|s| s["strategy"] == name).unwrap()["step_s"].as_f64().unwrap()
    };
    assert!(share("balance") > plan["step_s"].as_f64().unwrap());
    // of one, the file's numbers without those that options have
    let model = "[job.model]\nname = \"own\"\nlayers = 8\nhidden = 1024\nvocabulary = 32000\n\
                 sequence = 1024\n[job.model.experts]\ncount = 16\ntop_k = 1\n";
    std::fs::write(&path, model).unwrap();
    let plan =
        json(&["plan", "--hosts", "4", "--file", name, "--top-k", "4", "--sequence", "2048"]);
    let found = &plan["job"]["model"];
    assert_eq!((&found["name"], &found["sequence"]), (&"own".into(), &2048.into()));
    assert_eq!(
        found["experts"],
        serde_json::json!({"count": 16, "top_k": 4, "shared": 0, "every": 1})
    );
    let text = said(&options.split_whitespace().collect::<Vec<_>>());
    assert!(text.contains("TP 2, CP 2, EP 8, PP 2×2, DP 16, ZeRO 1"), "{text}");
}

/// Of hosts with four GPUs that have no number of NICs, four.
#[test]
fn what_a_file_leaves_out_follows_from_what_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.toml");
    std::fs::write(&path, "[cluster]\nhosts = 100\ngpus = 4\n[job]\nmicro_batch = 4\n").unwrap();
    let plan = json(&["plan", "--file", path.to_str().unwrap()]);
    assert_eq!((&plan["cluster"]["nics"], &plan["job"]["batch"]), (&4.into(), &800.into()));
}

const SWEEP: [&str; 10] =
    ["simulate", "sweep", "--hosts", "8", "--lost", "1-3", "--patterns", "20", "--seed", "7"];

fn sweep(more: &[&str]) -> String {
    said(&[&SWEEP[..], more, &["--json"]].concat())
}

#[test]
fn a_sweep_is_the_same_on_any_number_of_cores() {
    assert_eq!(sweep(&["--cores", "1"]), sweep(&["--cores", "3"]));
    assert_ne!(sweep(&[]), said(&["simulate", "sweep", "--hosts", "8", "--seed", "8", "--json"]));
}

/// The first lines of a file.
fn cut(path: &Path, lines: usize, torn: &str) {
    let text = std::fs::read_to_string(path).unwrap();
    let mut file = std::fs::File::create(path).unwrap();
    text.lines().take(lines).for_each(|line| writeln!(file, "{line}").unwrap());
    write!(file, "{torn}").unwrap();
}

#[test]
fn an_interrupted_sweep_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sweep.jsonl");
    let name = path.to_str().unwrap();
    let whole = sweep(&[]);
    assert_eq!(sweep(&["--resume", name]), whole);
    let lines = std::fs::read_to_string(&path).unwrap().lines().count();
    assert_eq!(lines, 1 + 3 * 20);
    // half of them are done, and a line is cut off
    cut(&path, 30, "{\"lost\":1,\"patt");
    assert_eq!(sweep(&["--resume", name]), whole);
    assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), lines);
    // nothing is computed twice: a result that is there is taken as it is
    let text = std::fs::read_to_string(&path).unwrap();
    let begin = text.find("\"longer\":[").unwrap() + 10;
    let end = begin + text[begin..].find(',').unwrap();
    std::fs::write(&path, format!("{}9.5{}", &text[..begin], &text[end..])).unwrap();
    assert_ne!(sweep(&["--resume", name]), whole);
    // of another cluster
    let words = ["simulate", "sweep", "--hosts", "9", "--resume", name];
    let (text, code) = refused(&words);
    assert!(code == 1 && text.contains("is of another sweep"), "{text}");
    cut(&path, 1, "no line\n");
    let (text, _) = refused(&[&SWEEP[..], &["--resume", name]].concat());
    assert!(text.contains("a line is damaged"), "{text}");
}

#[test]
fn failures_at_given_times_stop_at_the_end() {
    let run =
        json(&["simulate", "run", "--hosts", "8", "--fail", "host3/nic2@2h+1h", "--for", "1d"]);
    let changes = run["changes"].as_array().unwrap();
    assert_eq!(changes.len(), 3);
    assert_eq!(changes[0]["step_s"], changes[2]["step_s"], "all is repaired");
    let share = |name: &str| {
        let all = run["strategies"].as_array().unwrap();
        all.iter().find(|s| s["strategy"] == name).unwrap()["share"].as_f64().unwrap()
    };
    // 83 minutes of a day
    assert!((share("restart") - (1.0 - 83.0 / 1440.0)).abs() < 1e-9);
    assert!(share("ours") > share("balance") && share("balance") > share("hotrepair"));
}

#[test]
fn a_month_is_that_of_its_seed() {
    let words = ["simulate", "month", "--hosts", "8", "--mtbf", "5000h", "--runs", "5"];
    let of = |seed| json(&[&words[..], &["--seed", seed]].concat());
    assert_eq!(of("1"), of("1"));
    assert_ne!(of("1"), of("2"));
    let rows = of("1");
    let failures = rows["strategies"][0]["failures"].as_f64().unwrap();
    // 64 NICs for 720 hours, each once in 5,000
    assert!((4.0..15.0).contains(&failures), "{failures}");
}

#[test]
fn failures_come_from_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("failures.csv");
    let name = path.to_str().unwrap();
    let words = ["simulate", "run", "--hosts", "8", "--for", "1d", "--trace", name];
    std::fs::write(&path, "# out of order\n7200,host3/nic2,3600\n3600,host0/nic0\n").unwrap();
    let options = ["--fail", "host0/nic0@1h", "--fail", "host3/nic2@2h+1h"];
    assert_eq!(json(&words), json(&[&words[..6], &options].concat()));
    std::fs::write(&path, "3600,host0/nic0\n7200,host8/nic0\n").unwrap();
    let (text, code) = refused(&words);
    assert!(
        code == 1 && text.contains("failures.csv: line 2: 'host8/nic0' is not there"),
        "{text}"
    );
    // a screen has some of them
    let many: String = (0..60).map(|n| format!("{n},host0/nic1,0.5\n")).collect();
    std::fs::write(&path, many).unwrap();
    let text = said(&words);
    assert!(text.contains("and 81 further changes (--json has all)"), "{text}");
    assert_eq!(json(&words)["changes"].as_array().unwrap().len(), 121);
}

/// A switch takes the NICs of all hosts along at once, and what stops a job does so once.
#[test]
fn parts_fail_at_rates_of_their_own() {
    let words = "simulate month --hosts 8 --runs 3 --nic-mtbf never --cable-mtbf never";
    let of = |more: &[&str]| {
        let words: Vec<&str> = words.split_whitespace().collect();
        let report = json(&[&words[..], more].concat());
        let restart = report["strategies"][0].clone();
        let number = |name: &str| restart[name].as_f64().unwrap();
        (number("failures"), number("stopped_s"))
    };
    assert_eq!(of(&[]), (0.0, 0.0));
    // eight leaves for 720 hours
    let (failures, stopped_s) = of(&["--switch-mtbf", "1000h"]);
    assert!((2.0..10.0).contains(&failures), "{failures}");
    assert!((stopped_s - failures * (4080.0 + 900.0)).abs() < 1e-6, "{stopped_s}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rates.toml");
    std::fs::write(&path, "[rates]\nswitch_mtbf_s = 3.6e6\nnic_mtbf_s = inf\n").unwrap();
    assert_eq!(of(&["--file", path.to_str().unwrap()]), (failures, stopped_s));
}

fn outcome<'j>(report: &'j serde_json::Value, strategy: Option<&str>) -> &'j serde_json::Value {
    let rows = report["rows"].as_array().unwrap();
    &rows.iter().find(|r| r["strategy"].as_str() == strategy).unwrap()["outcome"]
}

#[test]
fn serving_is_a_table_of_80_columns() {
    let text = said(&["simulate", "serve", "--model", "llama-3.1-405b", "--rate", "1"]);
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    for part in ["no failure", "none", "restart", "reroute", "DejaVu", "HotRepair", "ours"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(text.contains("2 hosts of 8 GPUs and 8 NICs of 400 Gbit/s"), "{text}");
    assert!(text.contains("lost: host0/nic0 after 50.0 s"), "{text}");
}

#[test]
fn serving_is_that_of_its_seed_on_any_number_of_cores() {
    let words = ["simulate", "serve", "--rate", "0.5-1.5:0.5", "--strategy", "ours,restart"];
    let of = |seed, cores| json(&[&words[..], &["--seed", seed, "--cores", cores]].concat());
    let report = of("1", "1");
    assert_eq!(report, of("1", "3"));
    assert_ne!(report["rows"], of("2", "1")["rows"]);
    assert_eq!(report["rows"].as_array().unwrap().len(), 3 * 3);
    let healthy = outcome(&report, None)["ttft_s"]["p95"].as_f64().unwrap();
    let restart = outcome(&report, Some("restart"))["ttft_s"]["p95"].as_f64().unwrap();
    assert!(restart > healthy + 20.0, "{restart} {healthy}");
    // nothing is lost
    let report = json(&[&words[..], &["--lost", "0"]].concat());
    assert_eq!(report["rows"].as_array().unwrap().len(), 3);
}

#[test]
fn a_trace_is_served_and_its_errors_name_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("requests.csv");
    let name = path.to_str().unwrap();
    let words = ["simulate", "serve", "--model", "opt-66b", "--trace", name, "--at-token", "800"];
    std::fs::write(&path, "# one\n0,500,1500\n").unwrap();
    let report = json(&words);
    let took = |strategy| outcome(&report, strategy)["latency_s"]["mean"].as_f64().unwrap();
    assert!(took(Some("restart")) > took(None) + 35.0);
    assert!(took(Some("ours")) < took(None) + 0.5);
    assert_eq!(outcome(&report, Some("none"))["lost"], 1);
    let text = said(&words);
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(text.contains("with token 800 of the first answer"), "{text}");
    assert!(text.contains("  end\n"), "{text}");
    std::fs::write(&path, "0,500,1500\n1,500\n").unwrap();
    let (text, code) = refused(&words);
    assert!(code == 1 && text.contains("requests.csv: line 2: '1,500' has 2 fields"), "{text}");
    // all NICs of a host
    std::fs::write(&path, "0,500,1500\n").unwrap();
    let text = said(&[&words[..], &["--lost", "8"]].concat());
    assert!(text.contains("ours        cannot"), "{text}");
}

/// One file for training and serving: each takes what is its own, over what is usual for it.
#[test]
fn what_serves_comes_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("all.toml");
    let name = path.to_str().unwrap();
    let text = "[cluster]\nhosts = 4\noversubscription = 2.0\n[recovery]\nswitch_s = 0.005\n\
                [serving]\nmodel = \"opt-66b\"\ndisaggregated = true\nrestart_s = 10.0\n\
                [gpu]\nmemory_gb = 141.0\n";
    std::fs::write(&path, text).unwrap();
    let words = ["simulate", "serve", "--rate", "1", "--strategy", "ours", "--file", name];
    let prompts = ["--prompt", "500", "--gpus", "4"];
    let report = json(&[&words[..], &prompts].concat());
    let serving = &report["serving"];
    assert_eq!((&serving["model"]["name"], &serving["tensor"]), (&"opt-66b".into(), &4.into()));
    assert_eq!(report["times"], serde_json::json!({"restart_s": 10.0, "switch_s": 0.005}));
    let cluster = &serving["cluster"];
    // as many NICs as GPUs, and the rate that is usual for serving
    assert_eq!((&cluster["nics"], &cluster["nic_mbps"]), (&4.into(), &400_000.into()));
    assert_eq!((&cluster["hosts"], &cluster["oversubscription"]), (&2.into(), &2.0.into()));
    assert_eq!(serving["gpu"]["memory_gb"], 141.0);
    let plan = json(&["plan", "--file", name, "--lost", "1"]);
    assert_eq!(
        (&plan["cluster"]["hosts"], &plan["cluster"]["nic_mbps"]),
        (&4.into(), &200_000.into())
    );
    std::fs::write(&path, "[serving]\ntensors = 4\n").unwrap();
    let (text, code) = refused(&words);
    assert!(code == 1 && text.contains("unknown field `tensors`"), "{text}");
}

/// Headings are those of groups, and what follows a group is not in it.
#[test]
fn options_stand_below_their_headings() {
    for (words, group) in [
        (&["plan"][..], "Cluster:"),
        (&["simulate", "run"], "Cluster:"),
        (&["simulate", "sweep"], "Cluster:"),
        (&["simulate", "month"], "Cluster:"),
        (&["simulate", "serve"], "What serves:"),
    ] {
        let help = said(&[words, &["--help"]].concat());
        let at = |text: &str| help.find(text).unwrap_or_else(|| panic!("{text}: {help}"));
        for option in ["  --json", "  --ray", "  --python"] {
            if option.contains("json") || words.contains(&"sweep") {
                assert!(at(option) < at(group), "{option}: {help}");
            }
        }
    }
}

/// A leaf, a rail, a pod, a part of the spines.
#[test]
fn switches_can_be_lost() {
    let step = |more: &[&str]| {
        // stages in different pods: a ring over all hosts would hardly cross spines
        let words = "plan --hosts 16 --pod-hosts 8 --oversubscription 2 --pipeline 2 --tensor 8";
        let words: Vec<&str> = words.split(' ').collect();
        let plan = json(&[&words[..], more].concat());
        let all = plan["strategies"].as_array().unwrap();
        let of =
            |name: &str| all.iter().find(|s| s["strategy"] == name).unwrap()["step_s"].as_f64();
        (plan["lost"].as_array().unwrap().len(), plan["step_s"].as_f64(), of("ours"), of("restart"))
    };
    let (lost, healthy, leaf, restart) = step(&["--fail", "tor3"]);
    assert!(lost == 8 && leaf > healthy && restart == healthy);
    let (lost, _, rail, _) = step(&["--fail", "rail3"]);
    assert!(lost == 16 && rail > healthy, "{rail:?}");
    // of one whose hosts have no NICs nothing goes on in place
    let (lost, _, pod, restart) = step(&["--fail", "pod1"]);
    assert!(lost == 64 && pod.is_none() && restart == healthy);
    let (lost, unchanged, spines, restart) = step(&["--fail", "spine=50%"]);
    assert!(lost == 0 && unchanged == healthy && spines > healthy && restart > healthy);
}

#[test]
fn a_picture_is_drawn_of_each_answer() {
    let folder = tempfile::tempdir().unwrap();
    for words in [
        &["plan", "--hosts", "4"][..],
        &["simulate", "run", "--hosts", "4", "--fail", "tor3@2h+1h", "--for", "1d"],
        &["simulate", "sweep", "--hosts", "4", "--lost", "1-2", "--patterns", "3"],
        &["simulate", "month", "--hosts", "4", "--mtbf", "5000h", "--runs", "3", "--spares", "1"],
        &["simulate", "serve", "--rate", "1,2", "--strategy", "ours,restart"],
    ] {
        let file = folder.path().join(format!("{}.svg", words[1].trim_start_matches('-')));
        let plain = said(words);
        let with = call(&[words, &["--svg", file.to_str().unwrap()]].concat());
        assert!(with.status.success());
        assert_eq!(plain.as_bytes(), with.stdout, "the answer is the same");
        let svg = std::fs::read_to_string(&file).unwrap();
        assert!(svg.contains("<svg") && svg.contains("ours"), "{words:?}");
    }
}

/// Where nothing is spare, a restart leaves hosts out until they are repaired.
#[test]
fn spare_hosts_are_counted() {
    let of = |spares: &str| {
        let words = "simulate month --hosts 8 --mtbf 2000h --repair 5d --runs 5 --spares";
        let words: Vec<&str> = words.split(' ').chain([spares]).collect();
        let report = json(&words);
        let row = |n: usize| report["strategies"][n].clone();
        let number = |row: &serde_json::Value, name: &str| row[name].as_f64().unwrap();
        let (restart, ours) = (row(0), row(5));
        (number(&restart, "share"), number(&restart, "fewer_s"), number(&ours, "share"))
    };
    let (none, one, many) = (of("0"), of("1"), of("100"));
    assert!(none.0 < one.0 && one.0 < many.0, "{none:?} {one:?} {many:?}");
    assert!(none.1 > one.1 && one.1 > many.1 && many.1 == 0.0);
    assert!(none.2 == many.2 && none.2 > many.0, "what goes on in place needs none");
    let text = said(&["simulate", "month", "--hosts", "4", "--runs", "2"]);
    assert!(text.contains("spare hosts for restarts: as many as it takes (--spares)"), "{text}");
}
