//! Reports of made-up logs.

use unbroken_events::{Event, Switch, SwitchKind, What};

use super::*;

const WALL_US: u64 = 1_700_000_000_000_000;

fn event(what: What, time_us: u64, pid: u32) -> Event {
    Event { what, time_us, wall_us: WALL_US + time_us, pid }
}

fn switch(from: &str, to: &str, kind: SwitchKind, time_us: u64, reason: &str) -> Event {
    let switch = Switch {
        kind,
        host: "a".into(),
        qp: 2,
        from: from.into(),
        to: to.into(),
        epoch: 1,
        reason: reason.into(),
        on_path_since_us: 0,
        detected_at_us: time_us - 100,
        detect_us: Some(300),
        switch_us: 100,
        replayed: 5,
    };
    event(What::Switch(switch), time_us, 7)
}

fn fault(time_us: u64) -> Event {
    let fault = "nic a/0 dead".into();
    event(What::Fault { fault, lasts_us: None, every_us: None }, time_us, 1)
}

fn log(job: &str, events: Vec<Event>) -> Log {
    Log { name: format!("/logs/{job}"), job: job.into(), events, ..Log::default() }
}

/// A fault, two queue pairs that answer it, the way back.
fn survived() -> Vec<Event> {
    vec![
        fault(1_000),
        event(What::DeviceFatal { nic: "a/0".into() }, 1_100, 7),
        switch("a/0-b/0", "a/1-b/1", SwitchKind::Passive, 1_500, "the NIC died"),
        switch("a/0-b/0", "a/1-b/1", SwitchKind::Passive, 1_600, "the peer moved"),
        event(What::FaultClear { fault: "nic a/0 dead".into() }, 9_000, 1),
        event(What::PortActive { nic: "a/0".into() }, 9_100, 7),
        switch("a/1-b/1", "a/0-b/0", SwitchKind::Planned, 9_999, "its first path works again"),
    ]
}

#[test]
fn switches_that_answer_one_failure_are_told_together() {
    let report = Report::of(&[log("train", survived())]);
    assert_eq!(report.incidents.len(), 1);
    let i = &report.incidents[0];
    assert_eq!((i.what.as_str(), i.nics.clone()), ("nic a/0 dead", vec!["a/0".to_owned()]));
    assert_eq!((i.switches(), i.replayed, i.back, i.over_us), (2, 10, 1, WALL_US + 9_000));
    assert_eq!(i.noticed, [("the NIC died".into(), 1), ("the peer moved".into(), 1)]);
    let job = &report.jobs[0];
    assert_eq!((job.passive, job.planned, job.failed, job.processes), (2, 1, 0, 1));
    assert_eq!((job.outages.count(), job.outages.max_us), (2, 400));
    assert!(report.advice[0].contains("Nothing needs to be done"), "{:?}", report.advice);
}

#[test]
fn failures_of_a_real_network_are_found_without_faults() {
    let port = |nic: &str, at| event(What::PortDown { nic: nic.into() }, at, 7);
    let passive = SwitchKind::Passive;
    let here = vec![
        port("mlx5_0", 1_000),
        switch("mlx5_0-10.0.0.2", "mlx5_1-10.0.1.2", passive, 2_000, "the port went down"),
        // A minute later, another one, on a NIC that told nothing.
        switch("mlx5_1-10.0.1.2", "mlx5_0-10.0.0.2", passive, 60_000_000, "nothing moved any more"),
    ];
    let report = Report::of(&[log("job 1", here)]);
    let all: Vec<&str> = report.incidents.iter().map(|i| i.what.as_str()).collect();
    assert_eq!(all, ["NIC mlx5_0 lost its link", "mlx5_1-10.0.1.2: nothing moved any more"]);
    assert!(report.advice[0].contains("mlx5_0 came back"), "{:?}", report.advice);
}

#[test]
fn a_job_that_failed_is_not_said_to_have_survived() {
    let why = || "no path is left <script>alert(1)</script>".into();
    let gave_up = What::GiveUp { host: "a".into(), qp: 2, why: why(), of_programs: false };
    let mut events = survived();
    events.insert(3, event(gave_up, 1_700, 7));
    let report = Report::of(&[log("train", events), log("other", Vec::new())]);
    assert_eq!(report.jobs.iter().map(|j| j.failed).collect::<Vec<_>>(), [0, 1]);
    let html = report.html();
    assert!(html.contains("1 queue pair failed for good") && !html.contains("survived<"), "{html}");
    assert!(!html.contains("<script") && html.contains("&lt;script&gt;"), "text stays text");
}

#[test]
fn a_page_is_whole_and_needs_nothing_from_elsewhere() {
    let html = Report::of(&[log("train", survived())]).html();
    for words in ["1 failure was survived", "nic a/0 dead", "<svg", "until noticed", "survived"] {
        assert!(html.contains(words), "{words} is not in\n{html}");
    }
    let elsewhere = html.replace("http://www.w3.org/", "");
    assert!(!elsewhere.contains("http://") && !elsewhere.contains("https://"));
    assert!(!html.contains("<script") && html.ends_with("</html>\n"));
    let empty = Report::of(&[log("train", Vec::new())]).html();
    assert!(empty.contains("Nothing failed.") && !empty.contains("NaN"));
}

/// A failure of a millisecond that is not over: the axis tells its ends apart, and its bar goes on.
#[test]
fn the_picture_of_a_short_log_says_when_and_what_is_open() {
    let mut events = survived();
    events.truncate(3);
    let html = Report::of(&[log("train", events)]).html();
    let clocks: Vec<&str> = html
        .split("text-anchor=")
        .skip(2)
        .map(|t| t.split('<').next().unwrap())
        .filter_map(|t| Some(t.split_once('>')?.1))
        .filter(|t| t.contains(':'))
        .collect();
    assert!(clocks.len() >= 3 && clocks[0] != clocks[2], "{clocks:?}");
    assert!(html.contains("not over when the log ends"), "{html}");
    assert!(html.contains("1 switch of queue pairs") && html.contains("(1 log)"), "{html}");
}

#[test]
fn a_nic_that_fails_again_and_again_is_to_be_drained() {
    let mut events = Vec::new();
    for n in 0..3 {
        let at = 1_000 + n * 20_000_000;
        events.push(event(What::PortDown { nic: "m0".into() }, at, 7));
        events.push(event(What::PortActive { nic: "m0".into() }, at + 500, 7));
    }
    let report = Report::of(&[log("j", events)]);
    assert_eq!(report.incidents.len(), 3);
    assert!(report.advice[0].contains("m0 failed 3 times"), "{:?}", report.advice);
}

/// A failure belongs to the latest incident of its NIC that is near, however many lie between.
#[test]
fn an_old_fault_that_still_holds_takes_what_it_causes() {
    let fatal = |nic: String, at| event(What::DeviceFatal { nic }, at, 7);
    let mut events = vec![fault(1_000)];
    events.extend((1..50).map(|n| fatal(format!("b/{n}"), n * 10_000_000)));
    let late = 600_000_000;
    events.push(switch("a/0-c/0", "a/1-c/1", SwitchKind::Passive, late, "the NIC died"));
    events.push(event(What::PortActive { nic: "b/7".into() }, late + 1, 7));
    events.push(fatal("b/7".into(), late + 2));
    let report = Report::of(&[log("j", events)]);
    assert_eq!(report.incidents.len(), 50);
    assert_eq!(report.incidents[0].switches(), 1);
    let seventh: Vec<_> = report.incidents.iter().filter(|i| i.what.contains("b/7 ")).collect();
    assert_eq!((seventh.len(), seventh[0].over_us), (1, WALL_US + late + 1));
}

#[test]
fn faults_that_nobody_met_take_no_room_and_what_is_left_out_is_said() {
    let set = |nic: usize, at| {
        let fault = format!("nic z/{nic} dead");
        event(What::Fault { fault, lasts_us: None, every_us: None }, at, 1)
    };
    let mut events: Vec<Event> = (0..10_000).map(|n| set(n, n as u64)).collect();
    let down = |n: u64| event(What::PortDown { nic: format!("m{n}") }, 100_000 + n, 7);
    events.extend((0..10_003).map(down));
    let report = Report::of(&[log("j", events)]);
    assert_eq!(
        (report.incidents.len(), report.incidents[0].what.as_str()),
        (10_000, "NIC m0 lost its link")
    );
    let said = "3 failures beyond the first 10000 were left out";
    assert!(report.notes.iter().any(|note| note.starts_with(said)), "{:?}", report.notes);
}
