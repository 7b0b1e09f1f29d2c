//! The paths (`crate::kernels::Backend`) that a Rust source file names, found by a small lexer.
//!
//! Comments (so doc tests), strings, and items under `#[cfg(test)]` are left out: those may name anything.
//! `use` trees are expanded: `use crate::{kernels::Backend, tensor}` names `crate::kernels::Backend` and
//! `crate::tensor`; a glob ends in `*`. Macros are read like other code.

/// One path and the line it starts on (from 1).
#[derive(Debug, PartialEq, Clone)]
pub(crate) struct NamedPath {
    pub(crate) segments: Vec<String>,
    pub(crate) line: usize,
}

/// Every path of two or more segments in `source`, outside comments, strings and test-only items.
pub(crate) fn named_paths(source: &str) -> Vec<NamedPath> {
    let tokens = without_test_items(&tokenize(source));
    let mut paths = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if matches!(tokens[at].kind, Kind::Ident(_)) {
            at = read_tree(&tokens, at, &[], &mut paths);
        } else {
            at += 1;
        }
    }
    paths.retain(|path| path.segments.len() > 1);
    paths
}

#[derive(Debug, Clone, PartialEq)]
enum Kind {
    Ident(String),
    PathSeparator,
    Other(char),
}

#[derive(Debug, Clone)]
struct Token {
    kind: Kind,
    line: usize,
}

/// Reads a path or use tree that starts at `at`, appends its paths, and returns the index behind it.
fn read_tree(tokens: &[Token], mut at: usize, prefix: &[String], paths: &mut Vec<NamedPath>) -> usize {
    let line = tokens[at].line;
    let mut segments = prefix.to_vec();
    loop {
        match tokens.get(at).map(|token| &token.kind) {
            Some(Kind::Ident(name)) => segments.push(name.clone()),
            Some(Kind::Other('*')) => segments.push("*".into()),
            Some(Kind::Other('{')) => return read_group(tokens, at, &segments, paths),
            // `Vec::<u8>::new`: a generic argument list ends what can be said about modules.
            _ => break,
        }
        at += 1;
        if tokens.get(at).map(|token| &token.kind) != Some(&Kind::PathSeparator) {
            break;
        }
        at += 1;
    }
    paths.push(NamedPath { segments, line });
    at
}

/// Reads `{a, b::c}` of a use tree, whose `{` is at `at`, and returns the index behind the `}`.
fn read_group(tokens: &[Token], mut at: usize, prefix: &[String], paths: &mut Vec<NamedPath>) -> usize {
    at += 1;
    while at < tokens.len() {
        match &tokens[at].kind {
            Kind::Other('}') => return at + 1,
            Kind::Ident(name) if name == "self" => {
                paths.push(NamedPath { segments: prefix.to_vec(), line: tokens[at].line });
                at += 1;
            }
            Kind::Ident(name) if name == "as" => at += 2,
            Kind::Ident(_) | Kind::Other('*') => at = read_tree(tokens, at, prefix, paths),
            _ => at += 1,
        }
    }
    at
}

/// Drops every item that `#[cfg(test)]` precedes: up to its closing brace, or its semicolon.
fn without_test_items(tokens: &[Token]) -> Vec<Token> {
    let is = |at: usize, kind: &Kind| tokens.get(at).is_some_and(|token| token.kind == *kind);
    let ident = |name: &str| Kind::Ident(name.into());
    let attribute =
        [Kind::Other('#'), Kind::Other('['), ident("cfg"), Kind::Other('('), ident("test"), Kind::Other(')')];
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if !attribute.iter().enumerate().all(|(offset, kind)| is(at + offset, kind)) {
            kept.push(tokens[at].clone());
            at += 1;
            continue;
        }
        at += attribute.len();
        let mut depth = 0usize;
        while at < tokens.len() {
            let kind = &tokens[at].kind;
            at += 1;
            match kind {
                Kind::Other('{') => depth += 1,
                Kind::Other('}') if depth <= 1 => break,
                Kind::Other('}') => depth -= 1,
                Kind::Other(';') if depth == 0 => break,
                _ => {}
            }
        }
    }
    kept
}

fn tokenize(source: &str) -> Vec<Token> {
    let chars: Vec<char> = source.chars().collect();
    let peek = |at: usize| chars.get(at).copied().unwrap_or('\0');
    let mut tokens = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < chars.len() {
        let start = at;
        match (chars[at], peek(at + 1)) {
            ('/', '/') => at = find(&chars, at, |c| c == '\n'),
            ('/', '*') => at = skip_block_comment(&chars, at),
            ('"', _) => at = skip_string(&chars, at),
            ('r', '"' | '#') | ('b', 'r') if raw_string_end(&chars, at).is_some() => {
                at = raw_string_end(&chars, at).unwrap_or(at + 1);
            }
            ('\'', _) => at = skip_char_or_lifetime(&chars, at),
            (':', ':') => {
                tokens.push(Token { kind: Kind::PathSeparator, line });
                at += 2;
            }
            (c, _) if c.is_alphanumeric() || c == '_' => {
                at = find(&chars, at, |c| !(c.is_alphanumeric() || c == '_'));
                let word: String = chars[start..at].iter().collect();
                if !c.is_numeric() {
                    tokens.push(Token { kind: Kind::Ident(word), line });
                }
            }
            (c, _) => {
                if !c.is_whitespace() {
                    tokens.push(Token { kind: Kind::Other(c), line });
                }
                at += 1;
            }
        }
        line += chars[start..at.min(chars.len())].iter().filter(|c| **c == '\n').count();
    }
    tokens
}

/// First index from `at` where `stop` holds, or the end.
fn find(chars: &[char], at: usize, stop: impl Fn(char) -> bool) -> usize {
    chars[at..].iter().position(|c| stop(*c)).map_or(chars.len(), |offset| at + offset)
}

fn skip_block_comment(chars: &[char], mut at: usize) -> usize {
    let mut depth = 0;
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn skip_string(chars: &[char], mut at: usize) -> usize {
    at += 1;
    while at < chars.len() && chars[at] != '"' {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}

/// Index behind the raw string (`r"…"`, `r#"…"#`, `br"…"`) that starts at `at`, if one does.
fn raw_string_end(chars: &[char], at: usize) -> Option<usize> {
    let open = find(chars, at, |c| c != 'r' && c != 'b');
    let quote = find(chars, open, |c| c != '#');
    if chars.get(quote) != Some(&'"') || open - at > 2 {
        return None;
    }
    let hashes = quote - open;
    let mut end = quote + 1;
    while end < chars.len() {
        let closing = chars.get(end + 1..end + 1 + hashes);
        if chars[end] == '"' && closing.is_some_and(|run| run.iter().all(|c| *c == '#')) {
            return Some(end + 1 + hashes);
        }
        end += 1;
    }
    Some(end)
}

/// `'x'` and `'\n'` are characters; `'a` is a lifetime, of which only the quote is skipped.
fn skip_char_or_lifetime(chars: &[char], at: usize) -> usize {
    match (chars.get(at + 1), chars.get(at + 2)) {
        (Some('\\'), _) => find(chars, at + 3, |c| c == '\'') + 1,
        (_, Some('\'')) => at + 3,
        _ => at + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::named_paths;

    fn found(source: &str) -> Vec<String> {
        named_paths(source).iter().map(|path| path.segments.join("::")).collect()
    }

    #[test]
    fn use_trees_are_expanded() {
        let source = "use crate::{kernels::{self, Backend as B, cpu::*}, tensor};\nuse super::plan::Plan;";
        let expected = [
            "crate::kernels",
            "crate::kernels::Backend",
            "crate::kernels::cpu::*",
            "crate::tensor",
            "super::plan::Plan",
        ];
        assert_eq!(found(source), expected);
    }

    #[test]
    fn paths_in_code_are_found_with_their_line() {
        let paths = named_paths("fn f<'a>(x: &'a str) {\n  let c = '\"';\n  crate::kernels::cpu::run(x)\n}");
        assert_eq!(paths.len(), 1);
        assert_eq!((paths[0].segments.join("::").as_str(), paths[0].line), ("crate::kernels::cpu::run", 3));
    }

    #[test]
    fn comments_strings_and_test_items_are_left_out() {
        let source = r####"
            /// use crate::kernels::cpu; /* nested? */
            /* a /* b */ use crate::mlp::A; */
            const A: &str = "crate::mlp::A \" crate::mlp::B";
            const B: &str = r#"crate::mlp::A " crate::mlp::B"#;
            #[cfg(test)]
            mod tests { use crate::mlp::A; fn f() { if x { crate::mlp::B } } }
            #[cfg(test)]
            use crate::mlp::C;
            use crate::tensor::D;
        "####;
        assert_eq!(found(source), ["crate::tensor::D"]);
    }
}
