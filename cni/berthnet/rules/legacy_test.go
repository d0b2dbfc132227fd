package rules

import (
	"net/netip"
	"testing"
)

// Rules that are torn are refused, whatever they are.
func FuzzLegacyRules(f *testing.F) {
	f.Add(true, 0, make([]byte, 152))
	f.Add(false, 0, make([]byte, 208))
	subnets := []netip.Prefix{netip.MustParsePrefix("10.99.0.0/24"), netip.MustParsePrefix("fd99::/64")}
	f.Fuzz(func(t *testing.T, v6 bool, policy int, data []byte) {
		family := legacyFamilies[0]
		if v6 {
			family = legacyFamilies[1]
		}
		drops, knows, err := family.judge(&legacyRules{data, policy}, "bn0", subnets)
		if err != nil && (drops || knows) {
			t.Errorf("of torn rules: drops %v, knows %v, %v", drops, knows, err)
		}
	})
}
