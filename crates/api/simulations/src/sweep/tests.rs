use super::*;
use crate::question::Question;

fn args(words: &[&str]) -> SweepArgs {
    let words = ["sweep", "--hosts=4"].iter().chain(words).map(|word| word.to_string());
    match Question::read(words).unwrap() {
        Question::Sweep(args) => args,
        _ => panic!("it is a sweep"),
    }
}

fn json(sweep: &Sweep) -> String {
    serde_json::to_string(&sweep.report()).unwrap()
}

#[test]
fn counts_are_one_or_a_range() {
    assert_eq!(counts("3"), Ok(Counts { first: 3, last: 3 }));
    assert_eq!(counts("1-10"), Ok(Counts { first: 1, last: 10 }));
    for wrong in ["0", "5-2", "x", "1-", "-3"] {
        assert!(counts(wrong).unwrap_err().contains("1-10 are right"));
    }
}

/// Parts go through text, as they do to other machines: not a bit may change. The share makes an
/// efficiency of the job that has all digits.
#[test]
fn parts_that_are_computed_elsewhere_make_the_same_answer() {
    let words = ["--share=0.31", "--batch=8", "--lost=1-3", "--patterns=20", "--seed=7"];
    let watch = Watch::default();
    let here = Sweep::open(&args(&words), &watch).unwrap();
    here.finish(&watch).unwrap();
    assert_eq!(watch.far(), (60, 60));

    let watch = Watch::default();
    let there = Sweep::open(&args(&words), &watch).unwrap();
    let Missing { of, parts } = there.missing();
    assert_eq!(parts.len(), 3);
    // the last first, in two halves each
    for part in parts.iter().rev() {
        for (first, end) in [(10, 20), (0, 10)] {
            let work = Work { of: of.clone(), part: Part { first, end, ..*part } };
            let work = serde_json::to_string(&work).unwrap();
            let work: Work = serde_json::from_str(&work).unwrap();
            let lines = serde_json::to_string(&work.lines(&Watch::default()).unwrap()).unwrap();
            let lines: Vec<Line> = serde_json::from_str(&lines).unwrap();
            there.add(&lines, &watch).unwrap();
            // a part that comes twice counts once
            there.add(&lines[..1], &watch).unwrap();
        }
    }
    assert_eq!(watch.far(), (60, 60));
    assert_eq!(there.missing().parts, []);
    assert_eq!(json(&there), json(&here));
}

#[test]
fn what_is_missing_are_runs_of_patterns() {
    let sweep = Sweep::open(&args(&["--lost=2-3", "--patterns=6"]), &Watch::default()).unwrap();
    let line = |lost, pattern| Line { lost, pattern, longer: [Some(0.5); 4] };
    sweep.add(&[line(2, 0), line(2, 3), line(2, 4)], &Watch::default()).unwrap();
    let part = |lost, first, end| Part { lost, first, end };
    assert_eq!(sweep.missing().parts, [part(2, 1, 3), part(2, 5, 6), part(3, 0, 6)]);
    let foreign = sweep.add(&[line(2, 6)], &Watch::default()).unwrap_err();
    assert!(foreign.text.contains("of another sweep"), "{foreign}");
}

#[test]
fn parts_of_another_version_or_out_of_bounds_are_refused() {
    let sweep = Sweep::open(&args(&[]), &Watch::default()).unwrap();
    let Missing { of, parts } = sweep.missing();
    let says = |work: Work| work.lines(&Watch::default()).unwrap_err().text;
    let other = Subject { version: "9.9.9".into(), ..of.clone() };
    let text = says(Work { of: other, part: parts[0] });
    assert!(text.contains("9.9.9") && text.contains("the same everywhere"), "{text}");
    let text = says(Work { of: of.clone(), part: Part { lost: 33, ..parts[0] } });
    assert!(text.contains("up to 32 are right"), "{text}");
    let text = says(Work { of, part: Part { end: 0, ..parts[0] } });
    assert!(text.contains("none of a sweep"), "{text}");
}

/// A step that cannot be had since nobody waits for it is not one that cannot go on.
#[test]
fn a_sweep_that_was_stopped_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let file = format!("--resume={}", folder.path().join("sweep.jsonl").display());
    let words = ["--lost=1-2", "--patterns=40", &file];
    let watch = Watch::default();
    let stopped = Sweep::open(&args(&words), &watch).unwrap();
    let busy = Sweep::open(&args(&words), &Watch::default()).err().unwrap();
    assert!(busy.text.contains("another sweep writes to"), "{busy}");
    std::thread::scope(|scope| {
        let finish = scope.spawn(|| stopped.finish(&watch));
        while watch.far().0 == 0 && !finish.is_finished() {
            std::thread::yield_now();
        }
        watch.stop();
        match finish.join().unwrap() {
            Ok(()) => assert_eq!(watch.far().0, 80, "it was done before"),
            Err(e) => assert_eq!(e.kind, crate::Kind::Stopped),
        }
    });
    let known = watch.far().0;
    drop(stopped);
    let watch = Watch::default();
    let again = Sweep::open(&args(&words), &watch).unwrap();
    assert_eq!(watch.far(), (known, 80));
    again.finish(&watch).unwrap();
    let whole = Sweep::open(&args(&words[..2]), &Watch::default()).unwrap();
    whole.finish(&Watch::default()).unwrap();
    assert_eq!(json(&again), json(&whole));
}

/// What a file says of its sweep and of its results is read as it was written.
#[test]
fn a_file_is_that_of_its_sweep_whatever_digits_it_has() {
    let folder = tempfile::tempdir().unwrap();
    for percent in 10..40 {
        let share = format!("--share={percent}%");
        let file = format!("--resume={}", folder.path().join(&share).display());
        let words = [&share, "--batch=8", "--lost=1-2", "--patterns=5", &file];
        let answer = || {
            let sweep = Sweep::open(&args(&words), &Watch::default()).unwrap();
            sweep.finish(&Watch::default()).unwrap();
            json(&sweep)
        };
        assert_eq!(answer(), answer(), "{percent} %");
    }
}
