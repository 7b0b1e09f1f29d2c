//! Names of tensors, which may hold any character, in text for people.

use std::borrow::Cow;

/// A tensor's name for a message or a table: control characters, which would break a line or steer a terminal, are
/// escaped as by [`char::escape_debug`]; all others stay as they are.
///
/// ```
/// use moe4::checkpoint::printable;
///
/// assert_eq!(printable("w\n\u{1b}[2J"), r"w\n\u{1b}[2J");
/// assert_eq!(printable("größe '1'"), "größe '1'");
/// ```
pub fn printable(name: &str) -> Cow<'_, str> {
    if !name.contains(char::is_control) {
        return name.into();
    }
    let mut text = String::with_capacity(name.len());
    for character in name.chars() {
        if character.is_control() {
            text.extend(character.escape_debug());
        } else {
            text.push(character);
        }
    }
    text.into()
}
