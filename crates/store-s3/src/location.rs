//! `s3://bucket/prefix`.

use std::fmt;
use std::str::FromStr;

/// A place for a store in an object store.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Location {
    pub bucket: String,
    /// Parts between slashes; may be empty.
    pub prefix: String,
}

/// A text that is no location.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no location in an object store: {why}")]
pub struct LocationError {
    text: String,
    why: &'static str,
}

impl LocationError {
    /// What the user can do about it, one line.
    #[must_use]
    pub fn remedy(&self) -> String {
        "write s3://BUCKET or s3://BUCKET/PREFIX, the prefix of a-z A-Z 0-9 . _ - and slashes"
            .into()
    }
}

impl FromStr for Location {
    type Err = LocationError;

    fn from_str(text: &str) -> Result<Self, LocationError> {
        let wrong = |why| LocationError { text: text.to_owned(), why };
        let rest =
            text.strip_prefix("s3://").ok_or_else(|| wrong("it does not begin with s3://"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
        let in_bucket = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(&b);
        if !(3..=63).contains(&bucket.len()) || !bucket.bytes().all(in_bucket) {
            return Err(wrong("a bucket's name is 3 to 63 of a-z 0-9 . -"));
        }
        let in_part = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        let is_part = |part: &str| {
            part.bytes().all(in_part)
                && part.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
        };
        if prefix.len() > 512 || !(prefix.is_empty() || prefix.split('/').all(is_part)) {
            return Err(wrong("its prefix has other than names between slashes"));
        }
        Ok(Self { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{}", self.bucket)?;
        if self.prefix.is_empty() { Ok(()) } else { write!(f, "/{}", self.prefix) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_reads_back() {
        for (text, bucket, prefix) in [
            ("s3://abc", "abc", ""),
            ("s3://abc/", "abc", ""),
            ("s3://my-bucket.1/a/b_c", "my-bucket.1", "a/b_c"),
            ("s3://abc/a/", "abc", "a"),
        ] {
            let location: Location = text.parse().expect(text);
            assert_eq!((location.bucket.as_str(), location.prefix.as_str()), (bucket, prefix));
            assert_eq!(location.to_string(), text.trim_end_matches('/'));
        }
    }

    #[test]
    fn what_is_none_is_refused_with_the_reason() {
        for bad in [
            "",
            "abc",
            "http://abc",
            "s3://",
            "s3://ab",
            "s3://ABC",
            "s3://abc//x",
            "s3://abc/../x",
            "s3://abc/a b",
            "s3://abc/.a",
            "s3:///abc",
            "S3://abc",
        ] {
            let error = bad.parse::<Location>().expect_err(bad);
            assert!(error.to_string().contains(&format!("`{bad}`")), "{error}");
        }
    }
}
