package podyaml

import "strings"

// Expand replaces $(NAME) by lookup's value for NAME, as Kubernetes does in env values, command and
// args. $$ stands for a literal $, and $$(NAME) is not replaced. An unknown or unclosed reference
// stays unchanged.
func Expand(text string, lookup func(name string) (value string, ok bool)) string {
	var out strings.Builder
	for {
		at := strings.IndexByte(text, '$')
		if at < 0 || at == len(text)-1 {
			out.WriteString(text)
			return out.String()
		}
		out.WriteString(text[:at])
		replaced, rest := expandOne(text[at+1:], lookup)
		out.WriteString(replaced)
		text = rest
	}
}

// expandOne expands the text after a $ that is not the last byte.
func expandOne(after string, lookup func(string) (string, bool)) (replaced, rest string) {
	switch after[0] {
	case '$':
		return "$", after[1:]
	case '(':
		name, rest, closed := strings.Cut(after[1:], ")")
		if !closed {
			return "$(", after[1:]
		}
		if v, ok := lookup(name); ok {
			return v, rest
		}
		return "$(" + name + ")", rest
	default:
		return "$" + after[:1], after[1:]
	}
}
