// Package challenge reads what a server asks for with 401: the WWW-Authenticate headers (RFC 7235, section 4.1). It is pure.
//
// # Contract
//
// Whatever the headers are, there is an answer and no error: what cannot be parsed ends its header, and what stands before it in
// that header, and in others, counts. Names of schemes and parameters are in lower case; values are as they were meant, without quotes and escapes. Of a
// parameter that is given twice the last one counts. Nothing else is checked: which schemes there are, and whether a
// value may be sent or shown, the caller knows.
package challenge

import (
	"net/http"
	"strings"
)

// Challenge is one authentication scheme that a server offers.
type Challenge struct {
	Scheme string            // lower case
	Params map[string]string // by name, lower case; not nil
}

// Parse reads all WWW-Authenticate headers. A header holds a list of
// challenges separated by commas, as are the parameters of a challenge; what
// cannot be parsed ends its header.
func Parse(h http.Header) []Challenge {
	var all []Challenge
	for _, v := range h.Values("WWW-Authenticate") {
		for {
			var c Challenge
			c, v = parseChallenge(v)
			if c.Scheme == "" {
				break
			}
			all = append(all, c)
		}
	}
	return all
}

// parseChallenge reads one challenge and returns what follows it.
func parseChallenge(s string) (Challenge, string) {
	scheme, rest := token(skipList(s))
	c := Challenge{Scheme: strings.ToLower(scheme), Params: map[string]string{}}
	for {
		name, after := token(skipList(rest))
		value, ok := strings.CutPrefix(strings.TrimLeft(after, " \t"), "=")
		if name == "" || !ok {
			return c, rest // the end, or the next challenge's scheme
		}
		c.Params[strings.ToLower(name)], rest = parseValue(strings.TrimLeft(value, " \t"))
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
