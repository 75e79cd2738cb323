//! Labels as text, as JSON and as what clones inherit, for any text.

use proptest::prelude::*;
use vmfork_api::labels::{LABELS_MAX, match_all};
use vmfork_api::{LabelFilter, Labels};

fn pairs(most: usize) -> impl Strategy<Value = std::collections::BTreeMap<String, String>> {
    let value = "[^\\x00-\\x1f\\x7f-\\x9f]{0,20}";
    proptest::collection::btree_map("[A-Za-z0-9][A-Za-z0-9._/-]{0,62}", value, 0..=most)
}

fn parsed(pairs: &std::collections::BTreeMap<String, String>) -> Labels {
    let texts: Vec<String> = pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
    Labels::parse(texts.iter().map(String::as_str)).expect("labels")
}

proptest! {
    #[test]
    fn text_and_json_give_the_same_labels(pairs in pairs(LABELS_MAX)) {
        let labels = parsed(&pairs);
        let json = serde_json::to_string(&pairs).expect("json");
        prop_assert_eq!(&serde_json::from_str::<Labels>(&json).expect("labels"), &labels);
        prop_assert_eq!(serde_json::to_string(&labels).expect("json"), json);
    }

    #[test]
    fn text_and_json_accept_the_same(key in "[ -<>-~é\n]{0,66}", value in "[ -~é\n\t]{0,4}") {
        let text = Labels::parse([format!("{key}={value}").as_str()]);
        let json = serde_json::json!({ key.as_str(): value.as_str() });
        let json = serde_json::from_value::<Labels>(json);
        prop_assert_eq!(text.is_ok(), json.is_ok());
        // A filter is a label, or its key.
        let filter = format!("{key}={value}").parse::<LabelFilter>();
        prop_assert_eq!(filter.is_ok(), text.is_ok());
        if let (Ok(filter), Ok(labels)) = (filter, text) {
            prop_assert!(filter.matches(&labels));
        }
    }

    #[test]
    fn clones_have_their_own_labels_and_else_their_parents(parent in pairs(40), own in pairs(40)) {
        let all = parsed(&parent).with(&parsed(&own));
        let mut expected = parent.clone();
        expected.extend(own.clone());
        prop_assert_eq!(all.is_ok(), expected.len() <= LABELS_MAX);
        if let Ok(all) = all {
            prop_assert_eq!(&all, &parsed(&expected));
            let filters = own.iter().map(|(key, value)| format!("{key}={value}"));
            let filters: Vec<LabelFilter> =
                filters.map(|text| text.parse().expect("a filter")).collect();
            prop_assert!(match_all(&filters, &all));
        }
    }
}
