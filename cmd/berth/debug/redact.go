package debug

import (
	"encoding/json"
	"regexp"

	"github.com/pelletier/go-toml/v2"
)

const removed = "REMOVED"

// secretName matches names of values that look like secrets.
const secretName = `[\w.-]*(?:passw|secret|token|credential|api[_-]?key|private[_-]?key|access[_-]?key|identity_?token|auth)[\w.-]*`

var (
	secretKey = regexp.MustCompile(`(?i)^` + secretName + `$`)
	// header matches an HTTP header with credentials up to the end of its line.
	header = regexp.MustCompile(`(?i)\b(authorization|proxy-authorization|cookie|set-cookie|x-registry-auth)\b(\\?"?\s*[:=]\s*)[^\r\n]+`)
	bearer = regexp.MustCompile(`(?i)\b(bearer|basic)\s+[\w+/=.~-]{8,}`)
	// assigned matches name=value, name: value and "name": "value", also within escaped JSON.
	assigned = regexp.MustCompile(`(?i)(\b` + secretName + `\\?["']?\s*[:=]\s*)` +
		`(\\"(?:[^"\\]|\\\\.)*\\"|"(?:[^"\\]|\\.)*"|'[^']*'|\[[^\]\n]*\]|[^\s,;"'\[{}\]\\]+)`)
	userInfo = regexp.MustCompile(`(://)[^/\s"'@:]+(:[^/\s"'@]*)?@`)
)

// redact removes values from text that look like secrets. It is the second line of defence: parts
// leave out secrets that they know.
func redact(text []byte) []byte {
	text = header.ReplaceAll(text, []byte("${1}${2}"+removed))
	text = bearer.ReplaceAll(text, []byte("${1} "+removed))
	text = assigned.ReplaceAll(text, []byte("${1}"+removed))
	return userInfo.ReplaceAll(text, []byte("${1}"+removed+"@"))
}

// maskTree removes the values of secret keys, and of all keys below a key in whole, from decoded
// JSON or TOML.
func maskTree(v any, whole map[string]bool) any {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			if _, nested := value.(map[string]any); whole[key] || secretKey.MatchString(key) && !nested {
				v[key] = maskAll(value)
			} else {
				v[key] = maskTree(value, whole)
			}
		}
	case []any:
		for i := range v {
			v[i] = maskTree(v[i], whole)
		}
	}
	return v
}

// maskAll replaces a value, and keeps the keys of a table.
func maskAll(v any) any {
	table, ok := v.(map[string]any)
	if !ok {
		return removed
	}
	for key := range table {
		table[key] = removed
	}
	return table
}

// maskTOML returns a hosts.toml without the values of HTTP headers.
func maskTOML(content []byte) ([]byte, error) {
	var v map[string]any
	if err := toml.Unmarshal(content, &v); err != nil {
		return nil, err
	}
	return toml.Marshal(maskTree(v, map[string]bool{"header": true}))
}

// maskJSON returns a JSON document without the values of secret keys.
func maskJSON(content []byte) ([]byte, error) {
	var v any
	if err := json.Unmarshal(content, &v); err != nil {
		return nil, err
	}
	return json.MarshalIndent(maskTree(v, nil), "", "  ")
}
