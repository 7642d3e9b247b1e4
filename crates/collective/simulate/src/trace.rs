//! Failures that are given: one by one, or as the lines of a file.

use crate::cluster::{Cluster, Loss};
use crate::failures::Event;
use crate::outage::Outage;
use crate::Error;

/// The most failures of a trace.
pub const MOST_FAILURES: usize = 100_000;

/// A failure, and its repair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Failing {
    /// What is lost.
    pub loss: Loss,
    /// When, in seconds from the beginning.
    pub at_s: f64,
    /// How long its repair takes; none: it is not repaired.
    pub repair_s: Option<f64>,
}

/// Failures from a text: a line for each with the second in which it comes, the NIC, and how many
/// seconds its repair takes if it is repaired, with commas between. Lines may be in any order. What
/// follows a `#` is a comment.
pub fn failures(text: &str, cluster: &Cluster) -> Result<Vec<Failing>, Error> {
    const RIGHT: &str = "a line such as 3600,host3/nic2,1800 (second, NIC, seconds of its repair, \
                         which may be left out) is right";
    let (mut all, mut lines) = (Vec::new(), Vec::new());
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let wrong = |what: String| Error::Line { line: number + 1, what };
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let (second, nic, repair) = match fields[..] {
            [second, nic] => (second, nic, None),
            [second, nic, repair] => (second, nic, Some(repair)),
            _ => return Err(wrong(format!("'{line}' has {} fields; {RIGHT}", fields.len()))),
        };
        let seconds = |text: &str, least: f64| match text.parse::<f64>() {
            Ok(s) if s.is_finite() && s >= least => Ok(s),
            _ => Err(wrong(format!("'{text}' is no number of seconds; {RIGHT}"))),
        };
        let outage: Outage =
            nic.parse().map_err(|_| wrong(format!("'{nic}' is no NIC; {RIGHT}")))?;
        let lost = nics_of(cluster, outage).map_err(|e| wrong(e.to_string()))?;
        // a repair takes some time, or it would come before its failure
        let repair_s = repair.map(|text| seconds(text, f64::MIN_POSITIVE)).transpose()?;
        if all.len() + lost.len() > MOST_FAILURES {
            let text =
                format!("a trace has up to {MOST_FAILURES} failures; a shorter one is right");
            return Err(wrong(text));
        }
        let at_s = seconds(second, 0.0)?;
        lines.extend(lost.iter().map(|_| number + 1));
        all.extend(lost.into_iter().map(|loss| Failing { loss, at_s, repair_s }));
    }
    if all.is_empty() {
        return Err(Error::Line { line: 1, what: format!("there is no failure; {RIGHT}") });
    }
    match twice(&all) {
        None => Ok(all),
        Some((first, again)) => Err(Error::Line {
            line: lines[again],
            what: format!(
                "{} is lost already, since line {}; a repair of that before {} s is right",
                all[again].loss, lines[first], all[again].at_s
            ),
        }),
    }
}

/// The NICs that an outage takes along, which may come and go.
pub fn nics_of(cluster: &Cluster, outage: Outage) -> Result<Vec<Loss>, Error> {
    match outage {
        Outage::Spines(_) | Outage::Cores(_) => {
            let right = "`unbroken plan --fail` takes a part of spines or cores; \
                         NICs, tor3, rail2 and pod1 are right here";
            Err(Error::value("fail", "what fails", format!("'{outage}'"), right))
        }
        _ => Ok(cluster.outages(&[outage])?.0),
    }
}

/// Two failures of a NIC, or of a port, the second of which comes while it is lost.
pub fn twice(all: &[Failing]) -> Option<(usize, usize)> {
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by(|a, b| {
        let (a, b) = (&all[*a], &all[*b]);
        a.loss.cmp(&b.loss).then(a.at_s.total_cmp(&b.at_s))
    });
    let found = order.windows(2).find(|pair| {
        let (first, again) = (&all[pair[0]], &all[pair[1]]);
        let back_s = first.repair_s.map_or(f64::INFINITY, |s| first.at_s + s);
        first.loss == again.loss && again.at_s < back_s
    });
    found.map(|pair| (pair[0], pair[1]))
}

/// What happens before the end, in order.
pub fn events(failing: &[Failing], horizon_s: f64) -> Vec<Event> {
    let mut all = Vec::new();
    for Failing { loss, at_s, repair_s } in failing {
        all.push(Event { at_s: *at_s, loss: *loss, repaired: false });
        all.extend(repair_s.map(|s| Event { at_s: at_s + s, loss: *loss, repaired: true }));
    }
    all.retain(|e| e.at_s < horizon_s);
    all.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster() -> Cluster {
        Cluster { hosts: 4, ..Cluster::default() }
    }

    #[test]
    fn lines_are_failures_with_or_without_repair() {
        let text = "# second, NIC, repair\n7200, host3/nic2\n\n60,host0/nic0,1800 # a cable\n";
        let all = failures(text, &cluster()).unwrap();
        let loss = |text: &str| text.parse::<Loss>().unwrap();
        assert_eq!(
            all,
            [
                Failing { loss: loss("host3/nic2"), at_s: 7200.0, repair_s: None },
                Failing { loss: loss("host0/nic0"), at_s: 60.0, repair_s: Some(1800.0) },
            ]
        );
        let times = |horizon_s| {
            let all = events(&all, horizon_s);
            all.iter().map(|e| (e.at_s, e.repaired)).collect::<Vec<_>>()
        };
        assert_eq!(times(1e4), [(60.0, false), (1860.0, true), (7200.0, false)]);
        assert_eq!(times(1000.0), [(60.0, false)]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, part) in [
            ("", "line 1: there is no failure"),
            ("# nothing\n", "line 1: there is no failure"),
            ("1", "line 1: '1' has 1 fields"),
            ("1,host0/nic0\n1,host1/nic1,2,3", "line 2: '1,host1/nic1,2,3' has 4 fields"),
            ("x,host0/nic0", "line 1: 'x' is no number of seconds"),
            ("-1,host0/nic0", "line 1: '-1' is no number of seconds"),
            ("nan,host0/nic0", "line 1: 'nan' is no number of seconds"),
            ("5s,host0/nic0", "line 1: '5s' is no number of seconds"),
            ("1,host0/nic0,0", "line 1: '0' is no number of seconds"),
            ("1,host0/nic0,inf", "line 1: 'inf' is no number of seconds"),
            ("\n1,nic0", "line 2: 'nic0' is no NIC"),
            ("1,host4/nic0", "line 1: 'host4/nic0' is not there: there are host0 to host3"),
            ("1,host0/nic0/port1", "line 1: 'host0/nic0/port1' is not there"),
        ] {
            let says = failures(text, &cluster()).unwrap_err().to_string();
            assert!(says.starts_with(part), "{text:?}: {says}");
        }
        let many = "1,host0/nic0\n".repeat(MOST_FAILURES + 1);
        let says = failures(&many, &cluster()).unwrap_err().to_string();
        assert!(says.starts_with("line 100001: a trace has up to 100000 failures"), "{says}");
    }

    #[test]
    fn what_is_lost_cannot_be_lost_again() {
        let says = |text| failures(text, &cluster()).map_err(|e| e.to_string());
        let again = "90,host0/nic0\n# later\n10,host0/nic0,100\n";
        assert_eq!(
            says(again).unwrap_err(),
            "line 1: host0/nic0 is lost already, since line 3; a repair of that before 90 s is \
             right"
        );
        assert!(says("10,host0/nic0\n90,host0/nic0,5").unwrap_err().starts_with("line 2"));
        // repaired in time, another NIC, another port
        assert!(says("10,host0/nic0,80\n90,host0/nic0\n20,host0/nic1").is_ok());
    }
}
