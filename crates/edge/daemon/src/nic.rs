//! NICs with an embedded switch: their virtual functions, and the mode in which each has a
//! representor.
//!
//! | what the NIC is now | what is done |
//! | --- | --- |
//! | in switchdev mode, with the functions that are wanted | nothing |
//! | in legacy mode, without functions | switchdev mode, then the functions |
//! | in switchdev mode, without functions | the functions |
//! | with any other number of functions, or in legacy mode with some | an error: they may be in use, and it is the user's to let go of them |
//!
//! Representors and the uplinks' devices are made anew by the driver with the mode, so what is in
//! bridges and what has addresses is planned when they are there ([`awaited`]). [`plan`] is pure;
//! what `devlink` and sysfs say comes in.

use serde_json::Value;

use crate::command::{run, words};
use crate::config::{Config, Nic, Rules, Uplink};
use crate::error::{EdgeError, Result};
use crate::plan::Step;

const DEVICES: &str = "/sys/bus/pci/devices";

/// What a NIC is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shown {
    /// Of its embedded switch: `legacy` or `switchdev`.
    mode: String,
    /// How many virtual functions it has, and may have.
    functions: u32,
    most: u32,
}

/// The steps that the configuration's NICs still need here.
pub(crate) fn missing(config: &Config) -> Result<Vec<Step>> {
    plan(&config.nics, &look)
}

/// Asks the machine.
fn look(nic: &Nic) -> Result<Shown> {
    let shown = run(&["devlink", "-j", "dev", "eswitch", "show", &format!("pci/{}", nic.pci)])?;
    let number = |name: &str| -> Result<u32> {
        let path = format!("{DEVICES}/{}/{name}", nic.pci);
        let text = std::fs::read_to_string(&path).map_err(EdgeError::at(&path))?;
        let wrong = |_| format!("'{}' is not a number", text.trim());
        text.trim().parse::<u32>().map_err(wrong).map_err(EdgeError::at(&path))
    };
    Ok(Shown {
        mode: mode(&shown)?,
        functions: number("sriov_numvfs")?,
        most: number("sriov_totalvfs")?,
    })
}

/// The mode in what `devlink -j dev eswitch show` wrote of one device.
fn mode(text: &str) -> Result<String> {
    let value: Value = serde_json::from_str(text).map_err(EdgeError::at("devlink"))?;
    let device = value["dev"].as_object().and_then(|devices| devices.values().next());
    let mode = device.and_then(|device| device["mode"].as_str()).map(str::to_owned);
    mode.ok_or_else(|| {
        let shown = text.trim();
        EdgeError::Refused(format!("devlink tells no mode of the embedded switch: {shown}"))
    })
}

fn plan(nics: &[Nic], look: &dyn Fn(&Nic) -> Result<Shown>) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    for nic in nics {
        let Nic { pci, functions: wanted, line } = nic;
        let Shown { mode, functions, most } =
            look(nic).map_err(|e| EdgeError::config(*line, format!("the NIC {pci}: {e}")))?;
        if *wanted > most {
            return Err(EdgeError::config(
                *line,
                format!("the NIC {pci} may have {most} virtual functions at most, not {wanted}"),
            ));
        }
        let switchdev = mode == "switchdev";
        if functions == *wanted && switchdev {
            continue;
        }
        if functions > 0 {
            let why =
                if switchdev { format!(", not {wanted}") } else { format!(" in mode {mode}") };
            return Err(EdgeError::config(
                *line,
                format!(
                    "the NIC {pci} has {functions} virtual functions already{why}; when nobody \
                     uses them, take them away: echo 0 >{DEVICES}/{pci}/sriov_numvfs"
                ),
            ));
        }
        if !switchdev {
            let set = |mode: &str| words(&format!("devlink dev eswitch set pci/{pci} mode {mode}"));
            let key = format!("the NIC {pci} in switchdev mode");
            steps.push(Step {
                key,
                make: vec![set("switchdev")],
                patient: false,
                undo: vec![set(&mode)],
            });
        }
        if *wanted == 0 {
            continue;
        }
        let set = |count: u32| {
            vec!["sh".into(), "-c".into(), format!("echo {count} >{DEVICES}/{pci}/sriov_numvfs")]
        };
        let key = format!("virtual functions of the NIC {pci}");
        steps.push(Step { key, make: vec![set(*wanted)], patient: false, undo: vec![set(0)] });
    }
    Ok(steps)
}

/// The NIC of an uplink that stands in legacy mode and is to stay so, though rules are to be in
/// NICs: those of one card forward between each other's ports only if both are in switchdev mode.
/// `pci` gives a device's address on the bus, `mode` that of a NIC.
pub(crate) fn left_out<'a>(
    config: &'a Config,
    pci: &dyn Fn(&str) -> Option<String>,
    mode: &dyn Fn(&str) -> Option<String>,
) -> Vec<(&'a Uplink, String)> {
    if !matches!(config.rules, Rules::SkipSw | Rules::Both) {
        return Vec::new();
    }
    let named = |nic: &str| config.nics.iter().any(|n| n.pci == nic);
    let of = config.uplinks.iter().filter_map(|u| Some((u, pci(&u.device)?)));
    of.filter(|(_, nic)| !named(nic) && mode(nic).is_some_and(|m| m == "legacy")).collect()
}

/// As [`left_out`], of this machine, with what would be right.
pub(crate) fn missing_modes(config: &Config) -> Vec<String> {
    let pci = |device: &str| {
        let link = std::fs::read_link(format!("/sys/class/net/{device}/device")).ok()?;
        Some(link.file_name()?.to_str()?.to_owned())
    };
    let now = |nic: &str| {
        let command = ["devlink", "-j", "dev", "eswitch", "show", &format!("pci/{nic}")];
        mode(&run(&command).ok()?).ok()
    };
    let all = left_out(config, &pci, &now).into_iter();
    all.map(|(uplink, nic)| {
        format!(
            "line {}: {} is a port of the NIC {nic}, which is in legacy mode, and rules are to be \
             in NICs: add [[nic]] with pci = \"{nic}\" and virtual_functions = 0",
            uplink.line, uplink.device
        )
    })
    .collect()
}

/// A device of the configuration that is to be there before anything is planned, and is not: an
/// uplink, or a representor of a NIC.
pub(crate) fn awaited(config: &Config, there: &dyn Fn(&str) -> bool) -> Option<String> {
    let uplinks = config.uplinks.iter().map(|uplink| &uplink.device);
    let ports = config.tenants.iter().flat_map(|tenant| &tenant.ports);
    let ports: Vec<_> = ports.filter(|port| port.veth.is_none()).collect();
    let representors = ports.iter().map(|port| &port.representor);
    let functions = ports.iter().filter_map(|port| port.device.as_ref());
    uplinks.chain(representors).chain(functions).find(|device| !there(device)).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PCI: &str = "0000:03:00.0";

    fn planned(mode: &str, functions: u32) -> Result<Vec<Step>> {
        let nic = Nic { pci: PCI.into(), functions: 4, line: 7 };
        let shown = Shown { mode: mode.into(), functions, most: 8 };
        plan(&[nic], &|_| Ok(shown.clone()))
    }

    #[test]
    fn a_nic_gets_its_mode_before_its_functions_and_loses_them_in_turn() {
        let steps = planned("legacy", 0).unwrap();
        let made: Vec<String> = steps.iter().flat_map(|s| &s.make).map(|c| c.join(" ")).collect();
        let functions =
            |count| format!("sh -c echo {count} >/sys/bus/pci/devices/{PCI}/sriov_numvfs");
        let mode = |mode| format!("devlink dev eswitch set pci/{PCI} mode {mode}");
        assert_eq!(made, [mode("switchdev"), functions(4)]);
        let undone: Vec<String> =
            steps.iter().rev().flat_map(|s| &s.undo).map(|c| c.join(" ")).collect();
        assert_eq!(undone, [functions(0), mode("legacy")]);
        assert_eq!(planned("switchdev", 0).unwrap(), steps[1..]);
        assert_eq!(planned("switchdev", 4).unwrap(), []);
        // The other port of a card needs the mode alone.
        let other = Nic { pci: "0000:03:00.1".into(), functions: 0, line: 9 };
        let shown = Shown { mode: "legacy".into(), functions: 0, most: 8 };
        let steps = plan(&[other], &|_| Ok(shown.clone())).unwrap();
        assert_eq!(steps.len(), 1);
        assert_eq!(steps[0].key, "the NIC 0000:03:00.1 in switchdev mode");
    }

    #[test]
    fn functions_that_may_be_in_use_are_left() {
        for (mode, why) in [("switchdev", "already, not 4"), ("legacy", "already in mode legacy")] {
            let error = planned(mode, 2).unwrap_err().to_string();
            assert!(
                error.starts_with("line 7: the NIC 0000:03:00.0 has 2 virtual")
                    && error.contains(why),
                "{error}"
            );
        }
        assert!(planned("legacy", 4).is_err(), "the mode is not changed beneath functions");
        let many = Nic { pci: PCI.into(), functions: 9, line: 7 };
        let error = plan(&[many], &|_| Ok(Shown { mode: "legacy".into(), functions: 0, most: 8 }))
            .unwrap_err()
            .to_string();
        assert!(error.contains("may have 8 virtual functions at most, not 9"), "{error}");
        let gone = Nic { pci: PCI.into(), functions: 1, line: 7 };
        let error =
            plan(&[gone], &|_| Err(EdgeError::Refused("kernel answers: No such device".into())))
                .unwrap_err()
                .to_string();
        assert_eq!(error, "line 7: the NIC 0000:03:00.0: kernel answers: No such device");
    }

    #[test]
    fn the_other_port_of_a_card_is_not_left_in_legacy_mode() {
        let text = include_str!("../../../../docs/guide/edge/connectx.toml");
        let config = Config::parse(text).unwrap();
        let pci = |device: &str| Some(format!("0000:03:00.{}", device.strip_prefix('p')?));
        let legacy = |_: &str| Some("legacy".to_owned());
        assert_eq!(left_out(&config, &pci, &legacy), [], "the example names both");
        let one = Config { nics: config.nics[..1].to_vec(), ..config.clone() };
        let left = left_out(&one, &pci, &legacy);
        assert_eq!(left, [(&one.uplinks[1], "0000:03:00.1".to_owned())]);
        assert_eq!(left_out(&one, &pci, &|_: &str| Some("switchdev".to_owned())), []);
        assert_eq!(left_out(&Config { rules: Rules::SkipHw, ..one }, &pci, &legacy), []);
    }

    #[test]
    fn devlink_is_understood() {
        let text = r#"{"dev":{"pci/0000:03:00.0":{"mode":"switchdev","inline-mode":"none","encap-mode":"basic"}}}"#;
        assert_eq!(mode(text).unwrap(), "switchdev");
        assert!(mode("{}").unwrap_err().to_string().contains("tells no mode"));
        assert!(mode("Error").is_err());
    }
}
