//! The command as a user calls it, each test with a runtime folder of its own.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use unbroken_events::{
    BackupsStatus, Event, EventLog, ProcessStatus, QpStatus, StatusServer, Switch, SwitchKind, What,
};
use unbroken_fabric::{NicCounter, NicPage, Runtime, FAULT_FORMS};
use unbroken_runtime::{Presence, ProcessName};

fn unbroken(runtime: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_unbroken"))
        .args(args)
        .env("UNBROKEN_RUNTIME", runtime)
        .env_remove("UNBROKEN_HOST")
        .env_remove("UNBROKEN_NICS")
        .env_remove("UNBROKEN_FAILOVER")
        .env_remove("LD_PRELOAD")
        .output()
        .unwrap()
}

fn good(runtime: &Path, args: &[&str]) -> String {
    let output = unbroken(runtime, args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn bad(runtime: &Path, args: &[&str]) -> String {
    let output = unbroken(runtime, args);
    assert_eq!(output.status.code(), Some(1), "{args:?}");
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).unwrap()
}

fn json(runtime: &Path, args: &[&str]) -> Vec<Value> {
    good(runtime, args).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn faults_are_set_listed_and_cleared() {
    let dir = tempfile::tempdir().unwrap();
    let rt = dir.path();
    good(rt, &["fault", "set", "nic a/0 dead"]);
    good(rt, &["fault", "set", "switch", "rail1", "down", "--at", "1000s"]);
    let list = json(rt, &["fault", "list", "--json"]);
    assert_eq!(list[0]["fault"], "nic a/0 dead");
    assert_eq!((&list[0]["active"], &list[1]["active"]), (&Value::Bool(true), &Value::Bool(false)));
    let text = good(rt, &["fault", "list"]);
    assert!(
        text.starts_with("nic a/0 dead  (for ") && text.contains("switch rail1 down  (in "),
        "{text}"
    );
    let events = json(rt, &["events", "--json"]);
    assert_eq!(
        (&events[0]["event"], &events[0]["fault"]),
        (&"fault".into(), &"nic a/0 dead".into())
    );
    assert_eq!(events[0]["time_us"], list[0]["from_us"]);
    let output = unbroken(rt, &["fault", "clear", "nic a/1"]);
    assert!(
        output.status.success()
            && String::from_utf8_lossy(&output.stderr).contains("'nic a/0 dead'")
    );
    good(rt, &["fault", "clear", "nic a/0"]);
    assert_eq!(json(rt, &["fault", "list", "--json"]).len(), 1);
    good(rt, &["fault", "clear"]);
    assert_eq!(good(rt, &["fault", "list"]), "");
}

#[test]
fn schedules_are_set_and_shown() {
    let dir = tempfile::tempdir().unwrap();
    let rt = dir.path();
    good(rt, &["fault", "set", "nic a/0 down", "--at", "100s", "--for", "200ms", "--every", "5s"]);
    let again = ["--for", "100s", "--every", "200s"];
    good(rt, &[&["fault", "set", "delay", "cable", "b/1", "tx", "5ms"], &again[..]].concat());
    let text = good(rt, &["fault", "list"]);
    let lines: Vec<&str> = text.lines().collect();
    assert!(
        lines[0].starts_with("delay cable b/1 tx 5ms  (for 0.")
            && lines[0].ends_with(", lasts 100s, again every 200s)"),
        "{text}"
    );
    assert!(lines[1].ends_with(", lasts 200ms, again every 5s)"), "{text}");
    let list = json(rt, &["fault", "list", "--json"]);
    assert_eq!((&list[1]["lasts_us"], &list[1]["every_us"]), (&200_000.into(), &5_000_000.into()));
    assert_eq!((&list[0]["active"], &list[1]["active"]), (&Value::Bool(true), &Value::Bool(false)));
    let events = good(rt, &["events"]);
    assert!(events.contains("delay cable b/1 tx 5ms  (again every 200s)"), "{events}");
    assert!(!events.contains("nic a/0 down"), "it has not come yet: {events}");
    assert!(
        bad(rt, &["fault", "set", "nic a/0 down", "--every", "5s"]).contains("say for how long")
    );
    good(rt, &["fault", "clear", "delay cable b/1"]);
    good(rt, &["fault", "clear"]);
    let random = ["fault", "random", "--seed", "7", "--for", "30s", "--hosts", "a,b"];
    let shown = good(rt, &[&random[..], &["--dry-run"]].concat());
    assert_eq!(good(rt, &["fault", "list"]), "");
    assert_eq!(good(rt, &random), shown);
    let listed = json(rt, &["fault", "list", "--json"]);
    assert!(listed.len() > 10 && listed.len() == shown.lines().count());
    for fault in listed {
        let fault = fault["fault"].as_str().unwrap();
        assert!(shown.contains(fault) && !fault.contains("c/") && !fault.contains("d/"), "{fault}");
    }
    assert!(bad(rt, &["fault", "random", "--seed", "7", "--for", "1s", "--hosts", "z"])
        .contains("hosts are a, b, c, d"));
}

#[test]
fn errors_name_what_is_wrong_and_what_is_right() {
    let dir = tempfile::tempdir().unwrap();
    let rt = dir.path();
    assert!(bad(rt, &["fault", "set", "nic a/9 dead"])
        .contains("no NIC 'a/9'; NICs of this host are a/0, a/1, a/2, a/3"));
    assert!(
        bad(rt, &["fault", "set", "nic x/0 dead"]).contains("no host 'x'; hosts are a, b, c, d")
    );
    assert!(bad(rt, &["fault", "set", "nic a/0 ded"]).contains("not 'ded'"));
    assert!(bad(rt, &["fault", "clear", "nic a/9"]).contains("NICs of this host"));
    assert!(bad(rt, &["run", "--lib", "/bin/true", "--host", "e", "--", "true"])
        .contains("hosts are a, b, c, d"));
    assert!(bad(rt, &["run", "--lib", "/no/such.so", "--", "true"]).contains("/no/such.so"));
    assert!(bad(rt, &["run", "--lib", "/bin/true", "--nics", "10.0.0.1,eth0", "--", "true"])
        .contains("'eth0'"));
    assert_eq!(unbroken(rt, &["fault", "set", "nic a/0 dead", "--at", "3"]).status.code(), Some(2));
    assert_eq!(unbroken(rt, &["fly"]).status.code(), Some(2));
    fs::write(rt.join("fabric.toml"), "version = 1\noctet = 400\n").unwrap();
    assert!(
        bad(rt, &["fabric", "show"]).contains("fabric.toml:2: octet is 400; 1 to 254 are right")
    );
    assert!(bad(rt, &["--runtime", "/dev/null", "status"]).contains("/dev/null"));
}

#[test]
fn a_program_runs_with_our_environment() {
    let dir = tempfile::tempdir().unwrap();
    let rt = fs::canonicalize(dir.path()).unwrap();
    // Any shared object will do as the library; libc is there already.
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let libc = maps
        .lines()
        .filter_map(|l| l.split_whitespace().nth(5))
        .find(|p| p.contains("libc.so"))
        .unwrap();
    let script = "echo $UNBROKEN_HOST:$UNBROKEN_FAILOVER:$UNBROKEN_RUNTIME:$LD_PRELOAD:$1; exit 7";
    let output = unbroken(
        &rt,
        &["run", "--host", "b", "--lib", libc, "--", "sh", "-c", script, "sh", "--json"],
    );
    assert_eq!(output.status.code(), Some(7), "{}", String::from_utf8_lossy(&output.stderr));
    let libc = fs::canonicalize(libc).unwrap();
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        format!("b:1:{}:{}:--json\n", rt.display(), libc.display())
    );
    let script = "echo $UNBROKEN_HOST:$UNBROKEN_FAILOVER";
    let text = good(
        &rt,
        &["run", "--no-failover", "--lib", libc.to_str().unwrap(), "--", "sh", "-c", script],
    );
    assert_eq!(text, "a:0\n");
    let nics = [
        "run",
        "--nics",
        "10.0.0.1,10.0.1.1",
        "--lib",
        libc.to_str().unwrap(),
        "--",
        "sh",
        "-c",
        "echo $UNBROKEN_NICS",
    ];
    assert_eq!(good(&rt, &nics), "10.0.0.1,10.0.1.1\n");
    let output = unbroken(&rt, &["run", "--lib", libc.to_str().unwrap(), "--", "no-such-program"]);
    assert_eq!(output.status.code(), Some(127));
    let output = unbroken(&rt, &["run", "--lib", libc.to_str().unwrap(), "--", "/"]);
    assert_eq!(output.status.code(), Some(126));
}

#[test]
fn a_fabric_is_made_shown_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let rt = dir.path();
    assert!(good(rt, &["fabric", "up", "--hosts", "left,right", "--nics", "2"])
        .starts_with("hosts left, right with 2 NICs"));
    good(rt, &["fabric", "up", "--hosts", "left,right", "--nics", "2"]);
    assert!(bad(rt, &["fabric", "up"]).contains("fabric down"));
    good(rt, &["fault", "set", "nic right/1 down"]);
    let shown = &json(rt, &["fabric", "show", "--json"])[0];
    assert_eq!(shown["nics"][3]["nic"], "right/1");
    assert_eq!(shown["nics"][3]["state"], "down");
    assert!(good(rt, &["fabric", "show"]).contains("nic right/1 down"));
    good(rt, &["fabric", "down"]);
    assert!(bad(rt, &["fabric", "show"]).contains("`unbroken fabric up` makes one"));
    assert!(!rt.join("fabric.toml").exists(), "to look makes none");
    good(rt, &["fabric", "up"]);
    assert_eq!(good(rt, &["fabric", "show"]).lines().count(), 17, "the default one");
    assert!(bad(rt, &["fabric", "up", "--hosts", "a-b"]).contains("another shape"));
    good(rt, &["fabric", "down"]);
    assert!(bad(rt, &["fabric", "up", "--hosts", "a-b"]).contains("'a-b'"));
    assert!(!rt.join("fabric.toml").exists());
}

fn states(runtime: &Path) -> Vec<String> {
    let status: Value = serde_json::from_str(&good(runtime, &["status", "--json"])).unwrap();
    let nics = status["nics"].as_array().unwrap();
    nics.iter().map(|n| format!("{} {}", n["nic"], n["state"]).replace('"', "")).collect()
}

/// A NIC of the next fabric has nothing to do with one of this name in the last.
#[test]
fn no_drain_outlives_its_fabric() {
    let dir = tempfile::tempdir().unwrap();
    let rt = dir.path();
    good(rt, &["fabric", "up"]);
    good(rt, &["nic", "drain", "a/0"]);
    unbroken_runtime::Drains::of(&Runtime::at(rt).unwrap()).set("10.0.0.1", true).unwrap();
    assert!(states(rt).contains(&"a/0 active, drained".into()));
    good(rt, &["fabric", "down"]);
    good(rt, &["fabric", "up"]);
    assert!(states(rt).contains(&"a/0 active".into()), "{:?}", states(rt));
    let left = unbroken_runtime::Drains::of(&Runtime::at(rt).unwrap()).all().unwrap();
    assert_eq!(left.into_iter().collect::<Vec<_>>(), ["10.0.0.1"], "it is no NIC of a fabric");
}

#[test]
fn drains_take_the_names_that_faults_take() {
    for ports in ["1", "2"] {
        let dir = tempfile::tempdir().unwrap();
        let rt = dir.path();
        good(rt, &["fabric", "up", "--ports", ports]);
        for name in ["a/0", "a/0/1", "a/0/2"] {
            let fault = format!("nic {name} down");
            if !unbroken(rt, &["fault", "set", &fault]).status.success() {
                assert_eq!((ports, name), ("1", "a/0/2"));
                assert!(bad(rt, &["nic", "drain", name]).contains("there is no NIC a/0/2"));
                continue;
            }
            good(rt, &["fault", "clear"]);
            let said = good(rt, &["nic", "drain", name]);
            assert!(said.starts_with("a/0 is drained"), "{said}");
            let drained = states(rt).iter().filter(|s| s.ends_with("drained")).count();
            assert_eq!(drained.to_string(), ports, "all of the NIC is, and no other");
            assert!(good(rt, &["nic", "undrain", name]).starts_with("a/0 is used again"));
            assert!(!states(rt).iter().any(|s| s.ends_with("drained")));
        }
        for name in ["a/0/3", "a/9", "x", "10.0.0.1"] {
            assert!(bad(rt, &["nic", "drain", name]).contains("there is no NIC"), "{name}");
        }
    }
}

#[test]
fn a_fabric_in_use_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = Runtime::at(dir.path()).unwrap();
    let page = NicPage::open(&runtime, "127.9.1.0".parse().unwrap()).unwrap();
    let presence = Presence::join(&runtime).unwrap();
    // Of a dead process with a living one's pid: that is not in use.
    page.slot(1).take(ProcessName { pid: std::process::id(), id: 5 });
    good(dir.path(), &["fabric", "down"]);
    let page = NicPage::open(&runtime, "127.9.1.0".parse().unwrap()).unwrap();
    page.slot(0).take(presence.name());
    assert!(bad(dir.path(), &["fabric", "down"]).contains(&std::process::id().to_string()));
    good(dir.path(), &["fabric", "down", "--force"]);
}

#[test]
fn status_joins_pages_faults_and_processes() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = Runtime::at(dir.path()).unwrap();
    assert_eq!(good(dir.path(), &["status"]), "no NIC has been opened yet\n");
    assert!(!runtime.fabric_toml().exists(), "looking makes no fabric");
    good(dir.path(), &["fault", "set", "nic a/0 dead"]);
    let octet = unbroken_fabric::Fabric::open(&runtime).unwrap().octet();
    let page = NicPage::open(&runtime, [127, octet, 1, 1].into()).unwrap();
    page.slot(0).add(NicCounter::TxBytes, 5_000_000);
    page.slot(0).add(NicCounter::TxPackets, 5);
    NicPage::open(&runtime, "10.0.0.1".parse().unwrap()).unwrap();
    let server = StatusServer::bind(&runtime).unwrap();
    let pid = std::process::id();
    let qp = QpStatus {
        qp: 0x102,
        host: "a".into(),
        own: "127.77.1.1:258".into(),
        peer: "127.77.2.1:258".into(),
        path: "a/1-b/1".into(),
        epoch: 1,
        protected: false,
        why: "no backup".into(),
        state: "active".into(),
        ..QpStatus::default()
    };
    // The other end does not know of it.
    let (own, peer) = (qp.peer.clone(), qp.own.clone());
    let end = QpStatus {
        qp: 0x103,
        own,
        peer,
        path: "b/1-a/1".into(),
        protected: true,
        why: String::new(),
        ..qp.clone()
    };
    let third = QpStatus { qp: 0x104, own: "127.77.1.1:259".into(), ..end.clone() };
    let answer = ProcessStatus {
        pid,
        program: "ib_write_bw".into(),
        host: "a".into(),
        forged: 7,
        qps: vec![qp, end, third],
        nics: Vec::new(),
        backups: BackupsStatus {
            ready: 2,
            awaited: 1,
            made: 9,
            mean_us: 1_500,
            failures: 3,
            ..BackupsStatus::default()
        },
        sdr: None,
    };
    let ask = |args: &[&str]| {
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| good(dir.path(), args));
            while !server.accept_one(|| answer.clone()) {
                std::thread::yield_now();
            }
            asked.join().unwrap()
        })
    };
    let status: Value = serde_json::from_str(&ask(&["status", "--json"])).unwrap();
    let nic =
        |name: &str| status["nics"].as_array().unwrap().iter().find(|n| n["nic"] == name).unwrap();
    assert_eq!((&nic("a/0")["state"], &nic("a/1")["state"]), (&"dead".into(), &"active".into()));
    assert_eq!(nic("a/1")["tx_bytes"], 5_000_000);
    assert_eq!(nic("10.0.0.1")["state"], "unknown");
    let qp = &status["qps"][0];
    assert_eq!(
        (&qp["pid"], &qp["qp"], &qp["path"]),
        (&pid.into(), &0x102.into(), &"a/1-b/1".into())
    );
    let protected = |i: usize| (&status["qps"][i]["protected"], &status["qps"][i]["why"]);
    assert_eq!(protected(1), (&false.into(), &"its peer: no backup".into()));
    assert_eq!(protected(2), (&true.into(), &"".into()));
    let text = ask(&["status"]);
    assert!(
        text.contains("ib_write_bw")
            && text.contains("7 forged control")
            && text.contains("2 ready, 1 awaited; 9 made, 1500 µs each, 3 refused")
            && text.contains("no: no backup")
            && text.contains("nic a/0 dead"),
        "{text}"
    );
}

#[test]
fn events_are_joined_with_their_faults() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = Runtime::at(dir.path()).unwrap();
    assert_eq!(good(dir.path(), &["events", "--json"]), "");
    good(dir.path(), &["fault", "set", "nic a/0 dead"]);
    let fault_us = json(dir.path(), &["events", "--json"])[0]["time_us"].as_u64().unwrap();
    let switch = Switch {
        kind: SwitchKind::Passive,
        host: "a".into(),
        qp: 2,
        from: "a/0-b/0".into(),
        to: "a/1-b/1".into(),
        epoch: 1,
        reason: "device fatal".into(),
        on_path_since_us: fault_us - 1_000_000,
        detected_at_us: fault_us + 250,
        detect_us: None,
        switch_us: 400,
        replayed: 3,
    };
    EventLog::open(&runtime).emit(&Event::at(What::Switch(switch), fault_us + 650)).unwrap();
    let events = json(dir.path(), &["events", "--json"]);
    assert_eq!(events[1]["event"], "switch");
    assert_eq!(events[1]["detect_us"], 250);
    assert!(good(dir.path(), &["events"])
        .contains("noticed after 0.25 ms, switched in 0.40 ms, 3 sent again"));
}

#[test]
fn help_is_enough() {
    let dir = tempfile::tempdir().unwrap();
    assert!(good(dir.path(), &["help"]).contains("unbroken run --host b -- ib_write_bw"));
    // One is of a second port.
    good(dir.path(), &["fabric", "up", "--ports", "2"]);
    for help in [&["fault", "--help"][..], &["fault", "set", "--help"]] {
        let text = good(dir.path(), help);
        // Every fault that the help shows can be set.
        let table =
            text.lines().skip_while(|l| *l != "Faults:").skip(1).take_while(|l| !l.is_empty());
        // What is indented further goes on with the row above.
        let faults = table.filter(|l| !l.starts_with("   "));
        let faults: Vec<&str> = faults.map(|l| l.trim().split("  ").next().unwrap()).collect();
        assert_eq!(
            faults,
            FAULT_FORMS.iter().map(|form| form.example).collect::<Vec<_>>(),
            "{text}"
        );
        for fault in faults {
            good(dir.path(), &["fault", "set", fault]);
        }
    }
}
