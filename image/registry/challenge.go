package registry

import (
	"net/http"
	"strings"
)

// challenge is one authentication scheme that a server offers.
type challenge struct {
	Scheme string            // lower case
	Params map[string]string // by name, lower case; not nil
}

// parseChallenges parses the WWW-Authenticate headers of a 401 response (RFC 7235, section 4.1). A
// header is a list of challenges, separated by commas. Commas also separate the parameters of a
// challenge. After a syntax error the rest of the header is ignored. Schemes and parameter names
// are in lower case, values are unquoted. If a parameter is repeated, the last one counts.
// parseChallenges does not check whether a scheme is supported, or whether a value is safe to send
// or to show.
func parseChallenges(h http.Header) []challenge {
	var all []challenge
	for _, v := range h.Values("WWW-Authenticate") {
		for {
			var c challenge
			c, v = parseChallenge(v)
			if c.Scheme == "" {
				break
			}
			all = append(all, c)
		}
	}
	return all
}

// parseChallenge parses one challenge and returns the rest.
func parseChallenge(s string) (challenge, string) {
	scheme, rest := token(skipList(s))
	c := challenge{Scheme: strings.ToLower(scheme), Params: map[string]string{}}
	for {
		name, after := token(skipList(rest))
		value, ok := strings.CutPrefix(strings.TrimLeft(after, " \t"), "=")
		if name == "" || !ok {
			return c, rest // the end, or the scheme of the next challenge
		}
		c.Params[strings.ToLower(name)], rest = parseValue(strings.TrimLeft(value, " \t"))
	}
}

// parseValue parses a token or a quoted string.
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

// token parses an RFC 7230 token.
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
