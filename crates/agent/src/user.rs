//! Users and groups by `/etc/passwd` and `/etc/group` alone: a static program can't use NSS.

use std::io::Read;

/// Most bytes of either file that are looked at.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Who a program runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups, `gid` among them.
    pub(crate) groups: Vec<u32>,
    pub(crate) home: String,
    pub(crate) shell: String,
}

/// Look up `spec`: `NAME` or `UID`, with `:GROUP` or `:GID` behind it or not.
///
/// # Errors
/// A sentence, if there is no such user or group.
pub(crate) fn look_up(spec: &str) -> Result<User, String> {
    find(spec, &read("/etc/passwd"), &read("/etc/group"))
}

fn read(path: &str) -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = std::fs::File::open(path) {
        let _ = file.take(FILE_BYTES_MAX).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn find(spec: &str, passwd: &str, group: &str) -> Result<User, String> {
    let (who, group_spec) = match spec.split_once(':') {
        Some((who, group)) => (who, Some(group)),
        None => (spec, None),
    };
    let mut user = passwd
        .lines()
        .filter_map(parse_passwd)
        .find(|user| user.name == who || who.parse() == Ok(user.uid))
        .or_else(|| {
            let uid = who.parse().ok()?;
            Some(User {
                name: who.to_owned(),
                uid,
                gid: uid,
                groups: Vec::new(),
                home: "/".to_owned(),
                shell: "/bin/sh".to_owned(),
            })
        })
        .ok_or_else(|| format!("no user `{who}` in /etc/passwd"))?;
    let groups: Vec<(&str, u32, &str)> = group.lines().filter_map(parse_group).collect();
    match group_spec {
        Some(name) => {
            user.gid = groups
                .iter()
                .find(|(group, gid, _)| *group == name || name.parse() == Ok(*gid))
                .map(|(_, gid, _)| *gid)
                .or_else(|| name.parse().ok())
                .ok_or_else(|| format!("no group `{name}` in /etc/group"))?;
            user.groups = vec![user.gid];
        }
        None => {
            user.groups = vec![user.gid];
            let others = groups
                .iter()
                .filter(|(_, _, members)| members.split(',').any(|member| member == user.name))
                .map(|(_, gid, _)| *gid);
            user.groups.extend(others.filter(|gid| *gid != user.gid));
        }
    }
    Ok(user)
}

fn parse_passwd(line: &str) -> Option<User> {
    let mut fields = line.split(':');
    let name = fields.next()?.to_owned();
    let (uid, gid) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
    let (home, shell) = (fields.nth(1)?.to_owned(), fields.next().unwrap_or("").to_owned());
    let shell = if shell.is_empty() { "/bin/sh".to_owned() } else { shell };
    Some(User { name, uid, gid, groups: Vec::new(), home, shell })
}

fn parse_group(line: &str) -> Option<(&str, u32, &str)> {
    let mut fields = line.split(':');
    let name = fields.next()?;
    Some((name, fields.nth(1)?.parse().ok()?, fields.next().unwrap_or("")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/bash\nbroken\nana:x:1000:1001:Ana,,,:/home/ana:\n";
    const GROUP: &str = "root:x:0:\nana:x:1001:\nkvm:x:104:bob,ana\nwheel:x:9:anabel\n";

    #[test]
    fn a_name_gives_home_shell_and_the_groups_that_list_it() {
        let user = find("ana", PASSWD, GROUP).expect("is there");
        assert_eq!((user.uid, user.gid, user.groups), (1000, 1001, vec![1001, 104]));
        assert_eq!((user.home.as_str(), user.shell.as_str()), ("/home/ana", "/bin/sh"));
    }

    #[test]
    fn numbers_need_no_entry_and_names_do() {
        let user = find("77:kvm", PASSWD, GROUP).expect("a number will do");
        assert_eq!((user.uid, user.gid, user.groups), (77, 104, vec![104]));
        assert_eq!(find("bob", PASSWD, GROUP), Err("no user `bob` in /etc/passwd".into()));
        assert_eq!(find("ana:x", PASSWD, GROUP), Err("no group `x` in /etc/group".into()));
    }
}
