//! The host's own apt configuration, as far as a guest image is built with it. No host name of an
//! archive is written anywhere in vmfork.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::process::{self, Cancel};

/// Sections of Debian's own archive. Third parties that borrow a suite's name mostly have others.
const DEBIAN_COMPONENTS: [&str; 4] = ["main", "contrib", "non-free", "non-free-firmware"];

/// One archive, as a deb822 stanza or a line of sources.list says it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Source {
    uris: String,
    suites: Vec<String>,
    components: Vec<String>,
    signed_by: Option<String>,
}

/// The host's sources for `suite`, its updates and its security updates, in deb822 form; empty if
/// there are none.
pub(crate) fn host_sources(etc_apt: &Path, suite: &str) -> String {
    let mut files = vec![etc_apt.join("sources.list")];
    if let Ok(entries) = fs::read_dir(etc_apt.join("sources.list.d")) {
        let mut more: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
        more.sort();
        files.extend(more);
    }
    let mut sources: Vec<Source> = Vec::new();
    for file in files {
        let Ok(text) = fs::read_to_string(&file) else { continue };
        let found = match file.extension().and_then(|e| e.to_str()) {
            Some("sources") => deb822(&text),
            Some("list") => one_line(&text),
            _ => continue,
        };
        for mut source in found {
            source.suites.retain(|s| belongs_to(s, suite));
            source.components.retain(|c| DEBIAN_COMPONENTS.contains(&c.as_str()));
            if !source.suites.is_empty()
                && !source.components.is_empty()
                && !sources.contains(&source)
            {
                sources.push(source);
            }
        }
    }
    sources.iter().map(render).collect::<Vec<_>>().join("\n")
}

fn belongs_to(found: &str, suite: &str) -> bool {
    let found = found.trim_end_matches('/');
    found
        .strip_prefix(suite)
        .is_some_and(|rest| matches!(rest, "" | "-updates" | "-security" | "/updates"))
}

fn render(source: &Source) -> String {
    let signed_by = match &source.signed_by {
        Some(key) => format!("Signed-By: {key}\n"),
        None => String::new(),
    };
    format!(
        "Types: deb\nURIs: {}\nSuites: {}\nComponents: {}\n{signed_by}",
        source.uris,
        source.suites.join(" "),
        source.components.join(" "),
    )
}

fn words(text: &str) -> Vec<String> {
    text.split_ascii_whitespace().map(str::to_owned).collect()
}

fn deb822(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in text.lines().filter(|l| !l.starts_with('#')).chain([""]) {
        if line.trim().is_empty() {
            let get = |name: &str| {
                fields.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
            };
            let enabled = !get("Enabled").is_some_and(|v| v.trim().eq_ignore_ascii_case("no"));
            if enabled
                && words(get("Types").unwrap_or("")).iter().any(|t| t == "deb")
                && let (Some(uris), Some(suites)) = (get("URIs"), get("Suites"))
            {
                sources.push(Source {
                    uris: words(uris).join(" "),
                    suites: words(suites),
                    components: words(get("Components").unwrap_or("")),
                    signed_by: get("Signed-By").map(|v| v.trim_end().to_owned()),
                });
            }
            fields.clear();
        } else if line.starts_with([' ', '\t']) {
            // A continued value, such as a key written out in Signed-By: kept with its indentation.
            if let Some((_, value)) = fields.last_mut() {
                value.push('\n');
                value.push_str(line);
            }
        } else if let Some((name, value)) = line.split_once(':') {
            fields.push((name.trim().to_owned(), value.trim().to_owned()));
        }
    }
    sources
}

fn one_line(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        let Some(rest) = line.strip_prefix("deb").filter(|r| r.starts_with([' ', '\t'])) else {
            continue;
        };
        let rest = rest.trim_start();
        let (options, rest) = match rest.strip_prefix('[').and_then(|r| r.split_once(']')) {
            Some((options, rest)) => (options, rest),
            None => ("", rest),
        };
        let signed_by =
            words(options).iter().find_map(|o| o.strip_prefix("signed-by=").map(str::to_owned));
        let mut words = words(rest).into_iter();
        if let (Some(uris), Some(suite)) = (words.next(), words.next()) {
            sources.push(Source {
                uris,
                suites: vec![suite],
                components: words.collect(),
                signed_by,
            });
        }
    }
    sources
}

/// How the host's apt reaches its archives (proxies, certificates), as `--aptopt` values.
pub(crate) fn host_transport(cancel: &Cancel) -> Vec<String> {
    let mut command = std::process::Command::new("apt-config");
    command.arg("dump");
    let text = process::output(command, cancel, Duration::from_secs(30)).unwrap_or_default();
    transport_lines(&text)
}

fn transport_lines(dump: &str) -> Vec<String> {
    let is_transport = |line: &&str| {
        let lower = line.to_ascii_lowercase();
        ["acquire::http::", "acquire::https::"].iter().any(|p| lower.starts_with(p))
            && !lower.ends_with(" \"\";")
    };
    dump.lines().filter(is_transport).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_debians_own_sources_for_the_suite_are_taken() {
        let dir = tempfile::tempdir().unwrap();
        let list = dir.path().join("sources.list.d");
        fs::create_dir(&list).unwrap();
        fs::write(
            dir.path().join("sources.list"),
            "# deb http://no.test bookworm main\n\
             deb [arch=amd64 signed-by=/k.gpg] http://a.test/debian bookworm main contrib # x\n\
             deb-src http://a.test/debian bookworm main\n\
             deb http://cloud.test/apt tools-bookworm main\n\
             deb http://docker.test/linux bookworm stable\n",
        )
        .unwrap();
        fs::write(
            list.join("debian.sources"),
            "Types: deb deb-src\n# a comment\nURIs: http://b.test/debian\n\
             Suites: bookworm bookworm-updates bookworm-backports trixie\nComponents: main\n\
             Signed-By:\n -----BEGIN\n .\n x\n\n\
             Types: deb\nURIs: http://off.test\nSuites: bookworm\nComponents: main\nEnabled: no\n",
        )
        .unwrap();
        fs::write(list.join("old.list.save"), "deb http://c.test bookworm main\n").unwrap();
        assert_eq!(
            host_sources(dir.path(), "bookworm"),
            "Types: deb\nURIs: http://a.test/debian\nSuites: bookworm\nComponents: main contrib\n\
             Signed-By: /k.gpg\n\n\
             Types: deb\nURIs: http://b.test/debian\nSuites: bookworm bookworm-updates\n\
             Components: main\nSigned-By: \n -----BEGIN\n .\n x\n"
        );
        assert_eq!(host_sources(dir.path(), "forky"), "");
    }

    #[test]
    fn proxies_are_passed_on_and_defaults_are_not() {
        let dump = "APT \"\";\nAcquire::http::Proxy \"http://p.test:1\";\nAcquire::https \"\";\n\
                    Acquire::https::CAInfo \"/ca\";\nAcquire::cdrom::mount \"/media\";\n";
        let want = ["Acquire::http::Proxy \"http://p.test:1\";", "Acquire::https::CAInfo \"/ca\";"];
        assert_eq!(transport_lines(dump), want);
    }
}
