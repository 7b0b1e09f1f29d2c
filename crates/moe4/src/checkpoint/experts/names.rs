//! The names of experts' tensors.

/// The number of an expert in a tensor's name that is none: too large, or with a sign or leading zeros.
pub(in crate::checkpoint) struct BadNumber<'n>(pub(super) &'n str);

/// A tensor's name taken apart.
pub(in crate::checkpoint) struct ExpertName<'n> {
    pub(in crate::checkpoint) prefix: &'n str,
    /// `None` for fused names.
    pub(in crate::checkpoint) expert: Option<usize>,
    /// `gate_proj`, `w1`, `gate_up_proj` and so on.
    pub(in crate::checkpoint) projection: &'n str,
    /// `weight`, `weight_scale` and so on; empty for fused names.
    pub(in crate::checkpoint) part: &'n str,
}

impl<'n> ExpertName<'n> {
    /// `None` for a tensor that is not of an expert.
    pub(in crate::checkpoint) fn parse(name: &'n str) -> Result<Option<Self>, BadNumber<'n>> {
        let (prefix, rest) = match (name.split_once(".experts."), name.strip_prefix("experts.")) {
            (Some(found), _) => found,
            (None, Some(rest)) => ("", rest),
            (None, None) => return Ok(None),
        };
        let (first, rest) = rest.split_once('.').unwrap_or((rest, ""));
        if let (true, Some((projection, part))) = (is_integer(first), rest.split_once('.')) {
            // Names are made of numbers again: one that is written in another way would not be found.
            let number = first.parse::<u16>().ok().filter(|number| number.to_string() == first);
            let expert = Some(number.ok_or(BadNumber(first))?.into());
            return Ok(Some(Self { prefix, expert, projection, part }));
        }
        let fused =
            ["gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"];
        Ok((fused.contains(&first) && rest.is_empty()).then_some(Self {
            prefix,
            expert: None,
            projection: first,
            part: "",
        }))
    }
}

/// Whether a text is an integer, of whatever size.
fn is_integer(text: &str) -> bool {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}

pub(in crate::checkpoint) fn join(prefix: &str, rest: &str) -> String {
    if prefix.is_empty() { rest.to_owned() } else { format!("{prefix}.{rest}") }
}
