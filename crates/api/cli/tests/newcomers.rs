//! What somebody falls over who is new here: what did nothing, or something else, and said so to
//! nobody.

use std::fs;
use std::os::unix::fs::{symlink, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use unbroken_environment::PREFIX;
use unbroken_fabric::{NicPage, Runtime};
use unbroken_runtime::Presence;

/// A command with these variables of ours and no others.
fn command(variables: &[(&str, &str)], args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_unbroken"));
    command.args(args).env_remove("LD_PRELOAD");
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with(PREFIX)) {
        command.env_remove(name);
    }
    command.envs(variables.iter().copied());
    command
}

fn unbroken(runtime: &Path, variables: &[(&str, &str)], args: &[&str]) -> Output {
    let runtime = ("UNBROKEN_RUNTIME", runtime.to_str().unwrap());
    command(&[&[runtime], variables].concat(), args).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn good(runtime: &Path, variables: &[(&str, &str)], args: &[&str]) -> String {
    let output = unbroken(runtime, variables, args);
    assert!(output.status.success(), "{args:?}: {}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn bad(runtime: &Path, variables: &[(&str, &str)], args: &[&str]) -> String {
    let output = unbroken(runtime, variables, args);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {}", said(&output));
    said(&output)
}

/// A shared object that does nothing where it is preloaded: libc is there already.
fn libc() -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let of_line = |line: &str| line.split_whitespace().nth(5).map(String::from);
    let path = maps.lines().filter_map(of_line).find(|path| path.contains("libc.so")).unwrap();
    fs::canonicalize(path).unwrap().to_str().unwrap().into()
}

/// What a program sees of our variables.
fn seen(runtime: &Path, variables: &[(&str, &str)], options: &[&str]) -> String {
    let script = "echo $UNBROKEN_HOST:$UNBROKEN_NICS:$UNBROKEN_DEVICE:$UNBROKEN_FAILOVER";
    let library = libc();
    let run = [&["run"], options, &["--lib", &library, "--", "sh", "-c", script]].concat();
    good(runtime, variables, &run)
}

#[test]
fn run_takes_nics_from_the_environment() {
    let dir = tempfile::tempdir().unwrap();
    let nics = ("UNBROKEN_NICS", "10.0.0.1,10.0.1.1");
    assert_eq!(seen(dir.path(), &[nics], &[]), ":10.0.0.1,10.0.1.1::1\n");
    assert!(!dir.path().join("fabric.toml").exists(), "there is no emulated network");
    let plain = [nics, ("UNBROKEN_DEVICE", "plain"), ("UNBROKEN_HOST", "b")];
    assert_eq!(seen(dir.path(), &plain, &[]), ":10.0.0.1,10.0.1.1:plain:1\n");
    assert_eq!(seen(dir.path(), &[nics], &["--device", "plain"]), ":10.0.0.1,10.0.1.1:plain:1\n");
    assert_eq!(seen(dir.path(), &[nics], &["--nics", "10.0.0.9"]), ":10.0.0.9::1\n");
    assert_eq!(seen(dir.path(), &[nics], &["--host", "b"]), "b:::1\n");
    assert!(bad(dir.path(), &[], &["run", "--device", "plain", "--lib", &libc(), "true"])
        .contains("--nics"));
}

#[test]
fn words_for_off_are_off() {
    let dir = tempfile::tempdir().unwrap();
    for off in ["0", "no", "off", "FALSE"] {
        assert_eq!(seen(dir.path(), &[("UNBROKEN_FAILOVER", off)], &[]), "a:::0\n", "{off}");
    }
    for on in ["1", "yes", "On", "true", ""] {
        assert_eq!(seen(dir.path(), &[("UNBROKEN_FAILOVER", on)], &[]), "a:::1\n", "{on}");
    }
}

#[test]
fn a_variable_that_would_do_nothing_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let wrong = [
        ("UNBROKEN_NIC", "10.0.0.1", "UNBROKEN_NICS is right"),
        ("UNBROKEN_FAILBAK", "0", "UNBROKEN_FAILBACK is right"),
        ("UNBROKEN_FAILOVER", "nope", "right is 1/0, yes/no, on/off, true/false"),
        ("UNBROKEN_SHOW_EVENTS", "2", "right is 1/0, yes/no, on/off, true/false"),
        ("UNBROKEN_NICS", "eth0", "right is IP addresses, with commas"),
        ("UNBROKEN_DEVICE", "bare", "right is full, plain"),
        ("UNBROKEN_MAP", "0=1", "right is NICs as 0:1,2 1:3-2"),
    ];
    for (name, value, right) in wrong {
        for args in [&["status"][..], &["run", "--", "true"], &["fabric", "up"]] {
            let text = bad(dir.path(), &[(name, value)], args);
            assert!(text.contains(right) && text.lines().count() == 1, "{text}");
        }
    }
    let both = bad(dir.path(), &[("UNBROKEN_A", "1"), ("UNBROKEN_LOG", "x")], &["status"]);
    assert_eq!(both.lines().count(), 2, "{both}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing was done");
}

/// All that lies in a folder.
fn entries(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

const READING: [&[&str]; 9] = [
    &["status"],
    &["status", "--json"],
    &["events"],
    &["fault", "list"],
    &["fault", "clear"],
    &["fabric", "show"],
    &["fabric", "down"],
    &["coll", "status"],
    &["nic", "drain", "a/0"],
];

#[test]
fn to_look_makes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (typo, empty) = (dir.path().join("typo"), dir.path().join("empty"));
    fs::create_dir(&empty).unwrap();
    for args in READING {
        let text = bad(dir.path(), &[], &[&["--runtime", typo.to_str().unwrap()], args].concat());
        assert!(text.contains("typo: is not there"), "{args:?}: {text}");
        unbroken(&empty, &[], args);
        assert_eq!(entries(&empty), [""; 0], "{args:?}");
        // The default folder, where nothing has run yet, is no mistake.
        let home = dir.path().to_str().unwrap();
        let there = ["fabric show", "nic drain a/0"].contains(&args.join(" ").as_str());
        let output = command(&[("XDG_RUNTIME_DIR", home)], args).output().unwrap();
        assert_eq!(output.status.success(), !there, "{args:?}: {}", said(&output));
    }
    assert_eq!(entries(dir.path()), ["empty"]);
    let text = bad(Path::new("/usr"), &[], &["status"]);
    assert!(text.contains("is no runtime folder") || text.contains("belongs to"), "{text}");
    assert_eq!(good(&empty, &[], &["status"]), "no NIC has been opened yet\n");
}

/// A program that uses a NIC, as far as the runtime folder knows.
fn use_a_nic(runtime: &Runtime) -> Presence {
    let presence = Presence::join(runtime).unwrap();
    let page = NicPage::open(runtime, "127.9.1.0".parse().unwrap()).unwrap();
    page.slot(0).take(presence.name());
    presence
}

#[test]
fn a_fault_that_strikes_nobody_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let set = |args: &[&str]| said(&unbroken(dir.path(), &[], args));
    let (fault, random) = (["fault", "set", "nic a/0 dead"], ["--seed", "7", "--for", "9s"]);
    let random = [&["fault", "random"][..], &random].concat();
    let short = [&fault[..], &["--at", "3s", "--for", "500ms"]].concat();
    let again = [&short[..], &["--every", "1s"]].concat();
    for (args, when) in [
        (&fault[..], "waits for one"),
        (&again, "waits for one"),
        (&random, "is over in 9s"),
        (&short, "is over in 3.5s"),
    ] {
        let text = set(args);
        assert!(text.contains("no program runs in") && text.contains(when), "{text}");
    }
    let runtime = Runtime::at(dir.path()).unwrap();
    let _presence = use_a_nic(&runtime);
    assert_eq!((set(&fault), set(&random)), (String::new(), String::new()));
}

#[test]
fn faults_of_devices_need_a_program_that_takes_them() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |args: &[&str]| bad(dir.path(), &[], args);
    for (fault, right) in [
        ("nic mlx5_0 dead", "no program there was started with --faults"),
        ("nic a0 down", "named like 'a/0'"),
        ("swallow mlx5_0", "`unbroken run --devices mlx5_0 --faults -- PROGRAM`"),
        ("cable mlx5_0 cut", "there is no RDMA device 'mlx5_0'"),
        ("refuse mlx5_0", "'refuse mlx5_0 ENOMEM'"),
    ] {
        let text = refused(&["fault", "set", fault]);
        assert!(text.contains(right), "{fault}: {text}");
    }
    let wrong = |args: &[&str]| said(&unbroken(dir.path(), &[], args));
    let text = wrong(&["run", "--faults", "--host", "a", "--", "true"]);
    assert!(text.contains("--host"), "{text}");
    let text = wrong(&["run", "--faults", "--no-failover", "--", "true"]);
    assert!(text.contains("--no-failover"), "{text}");
    let text = wrong(&["fault", "clear", "swallow mlx5_0"]);
    assert!(text.contains("no fault 'swallow mlx5_0' is set"), "{text}");
}

#[test]
fn a_static_program_is_told_and_a_script_is_what_its_interpreter_is() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.to_str().unwrap().to_string()
    };
    // The loader's own head, without a way to load it: 32 bits, an Intel machine.
    let mut head = vec![0x7f, b'E', b'L', b'F', 1, 1, 1];
    head.resize(16, 0);
    head.extend([2, 0, 3, 0, 1, 0, 0, 0]);
    head.resize(40, 0);
    head.extend([52, 0, 32, 0]);
    head.resize(52, 0);
    let small = put("small", &head);
    let script = put("script", format!("#!{small}\n").as_bytes());
    let library = libc();
    for program in [&small, &script] {
        let text = bad(dir.path(), &[], &["run", "--lib", &library, "--", program]);
        assert!(text.contains("small is not for this library"), "{text}");
    }
    let path = format!("{}:/usr/bin:/bin", dir.path().display());
    let args = ["run", "--lib", &library, "--", "script"];
    assert!(bad(dir.path(), &[("PATH", &path)], &args).contains("32-bit"));
    assert_eq!(good(dir.path(), &[], &["run", "--lib", &library, "echo", "fine"]), "fine\n");
}

#[test]
fn reset_takes_all_away_that_is_ours() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("runtime");
    good(&folder, &[], &["fabric", "up"]);
    good(&folder, &[], &["fault", "set", "nic a/0 dead"]);
    let runtime = Runtime::at(&folder).unwrap();
    let presence = use_a_nic(&runtime);
    let text = bad(&folder, &[], &["reset"]);
    assert!(text.contains("is in use") && text.contains(&std::process::id().to_string()), "{text}");
    drop(presence);
    // Damaged: what should be a folder is a link, and what should be a file is a folder.
    fs::remove_dir_all(folder.join("directory")).unwrap();
    symlink(dir.path(), folder.join("directory")).unwrap();
    fs::remove_file(folder.join("fabric.toml")).unwrap();
    fs::create_dir(folder.join("fabric.toml")).unwrap();
    assert!(bad(&folder, &[], &["fabric", "down"]).contains("directory: is not a folder"));
    let away = folder.join("my notes");
    fs::write(&away, "").unwrap();
    assert!(bad(&folder, &[], &["reset"]).contains("it has my notes"));
    assert!(folder.join("directory").is_symlink());
    fs::remove_file(&away).unwrap();
    assert!(good(&folder, &[], &["reset"]).ends_with("is gone\n"));
    assert_eq!(entries(dir.path()), [""; 0], "and what the link led to is there");
    assert!(good(&folder, &[], &["reset"]).ends_with("is not there\n"));
    good(&folder, &[], &["fabric", "up"]);
    let runtime = Runtime::at(&folder).unwrap();
    let presence = use_a_nic(&runtime);
    good(&folder, &[], &["reset", "--force"]);
    drop(presence);
    assert!(!folder.exists());
}

#[test]
fn an_unknown_host_ends_a_bench_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let began = Instant::now();
    let text = bad(dir.path(), &[], &["coll", "bench", "--hosts", "a,z"]);
    assert!(text.contains("no host 'z'; hosts are a, b, c, d"), "{text}");
    assert!(began.elapsed() < Duration::from_secs(20), "the others have waited");
}

#[test]
fn a_rank_that_cannot_begin_ends_the_others() {
    let dir = tempfile::tempdir().unwrap();
    // Rank 0 cannot listen there, and rank 1 would wait for its id for a minute.
    let began = Instant::now();
    let variables = [("UNBROKEN_COLL_ADDRESS", "192.0.2.1")];
    let text = bad(dir.path(), &variables, &["coll", "bench", "--hosts", "a,b"]);
    assert!(text.contains("has failed; what it said is above"), "{text}");
    assert!(began.elapsed() < Duration::from_secs(20), "the others have waited");
}

#[test]
fn units_are_the_same_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    for rate in ["10G", "10Gbit", "10Gbit/s", "10Gbps"] {
        good(dir.path(), &[], &["fault", "set", &format!("rate a/0 {rate}")]);
        let model = ["model", "--bandwidth", rate, "--rtt", "25ms", "--loss", "1e-5"];
        good(dir.path(), &[], &[&model[..], &["--size", "4096"]].concat());
    }
    assert!(good(dir.path(), &[], &["fault", "list"]).contains("rate a/0 10Gbit"));
    let bench = ["coll", "bench", "--hosts", "a,b", "--max", "8B", "--min", "8", "--json"];
    let args = [&bench[..], &["--for", "200ms", "--timeout", "20s", "--patience", "1m"]].concat();
    assert!(good(dir.path(), &[], &args).contains("\"bytes\":8,"));
    let small = ["coll", "bench", "--hosts", "a,b", "--min", "3", "--max", "3", "--json"];
    let output = unbroken(dir.path(), &[], &small);
    assert!(String::from_utf8_lossy(&output.stdout).contains("\"bytes\":4,"));
    assert!(said(&output).contains("one element in each block are 4 bytes"), "{}", said(&output));
    let probe = ["sdr", "probe", "--payloads", "1K", "--trial", "10ms", "--trials", "1"];
    good(dir.path(), &[], &[&probe[..], &["--rate", "1Mbit"]].concat());
}

/// The children of a process.
fn children(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Whether a process runs: one that waits for its parent to hear of its end does not.
fn runs(pid: u32) -> bool {
    let state = |text: String| text.rsplit_once(") ").map(|(_, rest)| rest.to_string());
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).ok().and_then(state);
    state.is_some_and(|state| !state.starts_with(['Z', 'X']))
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn ranks_end_with_the_command_that_started_them() {
    let benches: [(&[&str], usize); 2] = [
        (&["coll", "bench", "--hosts", "a,b,c", "--for", "60s"], 3),
        (&["sdr", "bench", "--messages", "100000000", "--size", "1M"], 1),
    ];
    for (args, ranks) in benches {
        let dir = tempfile::tempdir().unwrap();
        let runtime = dir.path().to_str().unwrap();
        let mut bench = command(&[("UNBROKEN_RUNTIME", runtime)], args)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut started = Vec::new();
        wait_until("all ranks run", || {
            started = children(bench.id());
            // They have asked the kernel to end with it once they look for the others.
            started.len() == ranks && started.iter().all(|pid| open_files(*pid) > 8)
        });
        // SIGKILL: not even the parent has a say.
        bench.kill().unwrap();
        bench.wait().unwrap();
        wait_until("no rank is left", || !started.iter().any(|pid| runs(*pid)));
    }
}

/// How many descriptors a process has open.
fn open_files(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}
