//! What the OpenAPI document says about strings and lists: the patterns and bounds that the daemon
//! checks. These types exist for their schemas only; nothing makes values of them.

use std::borrow::Cow;
use std::marker::PhantomData;

use utoipa::openapi::schema::{
    AdditionalProperties, ArrayBuilder, ObjectBuilder, Schema, SchemaType, Type,
};
use utoipa::openapi::{Ref, RefOr};
use utoipa::{PartialSchema, ToSchema};

/// A string that matches a pattern (ECMA-262), as a component of the document.
macro_rules! text {
    ($name:ident, $pattern:expr, $description:literal $(, max_length = $max_length:expr)?) => {
        #[doc = $description]
        #[derive(Debug)]
        pub enum $name {}

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                string($pattern, $description)$(.max_length(Some($max_length)))?.into()
            }
        }

        impl ToSchema for $name {
            fn name() -> Cow<'static, str> {
                stringify!($name).into()
            }
        }
    };
}

text!(
    Name,
    "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
    "A name: 1 to 63 of a-z A-Z 0-9 . _ -, starting with a letter or digit."
);
text!(
    NewVmName,
    "^(?![0-9A-Fa-f]{16}$)[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
    "A name for a new VM, which must not look like an id (16 hex digits)."
);
text!(
    DiskName,
    "^[a-z][a-z0-9-]{0,31}$",
    "A disk's name: 1 to 32 of a-z 0-9 -, starting with a letter."
);
text!(DiskId, "^[1-9a-f][0-9a-f]{0,15}$", "A disk's ID: 1 to 16 hex digits, the first not 0.");
text!(
    HostAddress,
    concat!(
        r"^(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):0*",
        "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])$"
    ),
    "`HOST:PORT` or `[IPV6]:PORT`."
);
text!(JoinToken, r"^\s*vmfork-join-1:[A-Za-z0-9_-]+\s*$", "A token of `POST /v1/cluster/token`.");
text!(
    StoreLocation,
    concat!(
        r"^(?:/(?!.*://)[^\x00\n]*",
        "|s3://[a-z0-9.-]{3,63}(?:/|(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,99}){1,5}/?)?)$"
    ),
    "`s3://BUCKET/PREFIX`, or the absolute path of a folder on the daemon's host."
);
text!(
    ImageLocation,
    concat!(
        r"^(?:/(?!.*://)[^\x00\n]*",
        "|cluster://(?:[A-Za-z0-9][A-Za-z0-9._-]{0,62})?",
        "|s3://[a-z0-9.-]{3,63}(?:/|(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,99}){1,5}/?)?)$"
    ),
    "A store, or `cluster://[HOST]`: the hosts of the cluster that seed the image, or one of them."
);
text!(
    ObjectLocation,
    r"^s3://[a-z0-9.-]{3,63}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,99}){1,5}$",
    "`s3://BUCKET/KEY`: an object of an object store."
);
text!(Plain, r"^[^\x00]*$", "Text without NUL bytes.");
text!(
    Base64,
    concat!(
        "^(?:[A-Za-z0-9+/]{4})*",
        "(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?$"
    ),
    "Bytes in base64 (RFC 4648, with padding)."
);
text!(
    GuestPath,
    r"^/[^\x00]*$",
    "An absolute path in the guest, shorter than 4096 bytes.",
    max_length = 4095
);
text!(HostPath, r"^/[^\x00]*$", "An absolute path on the daemon's host.");
text!(
    GuestFilePath,
    r"^/(?:[^/\x00]*/)*(?:[^/\x00.][^/\x00]*|\.[^/\x00.][^/\x00]*|\.\.[^/\x00]+)$",
    "An absolute path of a file in the guest, shorter than 4096 bytes.",
    max_length = 4095
);
text!(
    Switch,
    "^(?:|0|1|false|true)$",
    "On if empty, `1` or `true`; off if `0`, `false` or absent."
);
text!(FileMode, "^0?[0-7]{1,4}$", "Permission bits in octal, at most 7777.");

fn string(pattern: &str, description: &str) -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(SchemaType::Type(Type::String))
        .pattern(Some(pattern))
        .description(Some(description))
}

/// An enum whose variants have no other fields than theirs: the schema that is derived does not say
/// so.
#[derive(Debug)]
pub struct Closed<T>(PhantomData<T>);

impl<T: PartialSchema> PartialSchema for Closed<T> {
    fn schema() -> RefOr<Schema> {
        let mut schema = T::schema();
        if let RefOr::T(Schema::OneOf(one_of)) = &mut schema {
            for variant in &mut one_of.items {
                if let RefOr::T(Schema::Object(object)) = variant {
                    let none = AdditionalProperties::FreeForm(false);
                    object.additional_properties = Some(Box::new(none));
                }
            }
        }
        schema
    }
}

impl<T: ToSchema> ToSchema for Closed<T> {
    fn name() -> Cow<'static, str> {
        T::name()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        T::schemas(schemas);
    }
}

/// Names for new VMs that are started together.
#[derive(Debug)]
pub enum NewVmNames {}

impl PartialSchema for NewVmNames {
    fn schema() -> RefOr<Schema> {
        ArrayBuilder::new()
            .items(Ref::from_schema_name("NewVmName"))
            .min_items(Some(1))
            .max_items(Some(1024))
            .unique_items(true)
            .description(Some("As many names as `count`, each another."))
            .into()
    }
}

impl ToSchema for NewVmNames {
    fn name() -> Cow<'static, str> {
        "NewVmNames".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.push((NewVmName::name().into(), NewVmName::schema()));
    }
}

/// A program and its arguments.
#[derive(Debug)]
pub enum Argv {}

impl PartialSchema for Argv {
    fn schema() -> RefOr<Schema> {
        ArrayBuilder::new()
            .prefix_items([string(r"^[^\x00]+$", "The program.")])
            .items(string(r"^[^\x00]*$", "An argument."))
            .min_items(Some(1))
            .description(Some("The program, looked up in the guest's PATH, and its arguments."))
            .into()
    }
}

impl ToSchema for Argv {
    fn name() -> Cow<'static, str> {
        "Argv".into()
    }
}

/// Environment variables.
#[derive(Debug)]
pub enum Environment {}

impl PartialSchema for Environment {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .property_names(Some(string(r"^[^=\x00]+$", "The name of a variable.")))
            .additional_properties(Some(AdditionalProperties::RefOr(
                string(r"^[^\x00]*$", "Its value.").into(),
            )))
            .description(Some("Environment variables."))
            .into()
    }
}

impl ToSchema for Environment {
    fn name() -> Cow<'static, str> {
        "Environment".into()
    }
}
