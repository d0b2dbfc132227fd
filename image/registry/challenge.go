package registry

import (
	"net/http"
	"strings"
)

// challenge is one authentication scheme a server offers (RFC 7235, section 4.1).
type challenge struct {
	scheme string // lower case
	params map[string]string
}

// parseChallenges reads all WWW-Authenticate headers. A header holds a list of
// challenges separated by commas, as are the parameters of a challenge; what
// cannot be parsed ends its header.
func parseChallenges(h http.Header) []challenge {
	var all []challenge
	for _, v := range h.Values("WWW-Authenticate") {
		for {
			var c challenge
			c, v = parseChallenge(v)
			if c.scheme == "" {
				break
			}
			all = append(all, c)
		}
	}
	return all
}

// parseChallenge reads one challenge and returns what follows it.
func parseChallenge(s string) (challenge, string) {
	scheme, rest := token(skipList(s))
	c := challenge{scheme: strings.ToLower(scheme), params: map[string]string{}}
	for {
		name, after := token(skipList(rest))
		value, ok := strings.CutPrefix(strings.TrimLeft(after, " \t"), "=")
		if name == "" || !ok {
			return c, rest // the end, or the next challenge's scheme
		}
		c.params[strings.ToLower(name)], rest = parseValue(strings.TrimLeft(value, " \t"))
	}
}

// parseValue reads a token or a quoted string.
func parseValue(s string) (value, rest string) {
	if !strings.HasPrefix(s, `"`) {
		end := strings.IndexAny(s, " \t,")
		if end < 0 {
			end = len(s)
		}
		return s[:end], s[end:]
	}
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '"':
			return b.String(), s[i+1:]
		case '\\':
			if i++; i == len(s) {
				return b.String(), ""
			}
		}
		b.WriteByte(s[i])
	}
	return b.String(), ""
}

// token reads an RFC 7230 token.
func token(s string) (tok, rest string) {
	i := 0
	for i < len(s) && isTokenByte(s[i]) {
		i++
	}
	return s[:i], s[i:]
}

func isTokenByte(b byte) bool {
	return b >= '0' && b <= '9' || b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' ||
		strings.IndexByte("!#$%&'*+-.^_`|~", b) >= 0
}

func skipList(s string) string { return strings.TrimLeft(s, ", \t") }
