package rules

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"
)

// legacyRule is a test's description of a rule.
type legacyRule struct {
	in, out  string // names of interfaces; "": any; "x+": all with the prefix x
	from, to string // prefixes; empty: any
	target   string // "": the standard target with a verdict
	verdict  int32
}

const legacyAccept = -2 // -NF_ACCEPT - 1

// bytes encodes the rule as the kernel does: struct ipt_entry or ip6t_entry, and struct
// xt_standard_target.
func (f *legacyFamily) bytes(r legacyRule) []byte {
	rule := make([]byte, f.ruleSize+legacyTarget+8)
	names := rule[4*f.address:]
	for i, name := range []string{r.in, r.out} {
		masked := len(name) + 1 // includes the zero at the end
		if n := len(name); n > 0 && name[n-1] == '+' {
			name, masked = name[:n-1], n-1
		}
		if name != "" {
			copy(names[i*ifNameSize:], name)
			copy(names[(i+2)*ifNameSize:], slices.Repeat([]byte{0xff}, masked))
		}
	}
	for i, text := range []string{r.from, r.to} {
		if text == "" {
			continue
		}
		p := netip.MustParsePrefix(text)
		copy(rule[i*f.address:], p.Addr().AsSlice())
		for bit := range p.Bits() {
			rule[(i+2)*f.address+bit/8] |= 0x80 >> (bit % 8)
		}
	}
	binary.NativeEndian.PutUint16(rule[f.targetAt:], uint16(f.ruleSize))
	binary.NativeEndian.PutUint16(rule[f.targetAt+2:], uint16(len(rule)))
	target := rule[f.ruleSize:]
	binary.NativeEndian.PutUint16(target, uint16(len(target)))
	copy(target[2:], r.target)
	binary.NativeEndian.PutUint32(target[legacyTarget:], uint32(r.verdict))
	return rule
}

// table returns rules with FORWARD's policy as the last but one.
func (f *legacyFamily) table(policy int32, rules ...legacyRule) *legacyRules {
	var t legacyRules
	for _, r := range rules {
		t.rules = append(t.rules, f.bytes(r)...)
	}
	t.policy = len(t.rules)
	t.rules = append(t.rules, f.bytes(legacyRule{verdict: policy})...)
	t.rules = append(t.rules, f.bytes(legacyRule{target: "ERROR"})...)
	return &t
}

var legacySubnets = []netip.Prefix{netip.MustParsePrefix("10.99.0.0/24"), netip.MustParsePrefix("fd99::/64")}

func TestJudgeLegacyRules(t *testing.T) {
	t.Parallel()
	type table struct {
		policy         int32
		rules          []legacyRule
		drops, hasRule bool
	}
	one := func(r legacyRule) []legacyRule { return []legacyRule{{in: "lo"}, r} }
	cases := map[string]table{
		"empty":                       {policy: legacyDrop, drops: true},
		"that accepts":                {policy: legacyAccept},
		"by its policy's name":        {policy: 5}, // a jump to another rule
		"from the bridge":             {legacyDrop, one(legacyRule{in: "bn0", verdict: legacyAccept}), true, true},
		"to the bridge":               {legacyDrop, one(legacyRule{out: "bn0"}), true, true},
		"to all such bridges":         {legacyDrop, one(legacyRule{out: "bn+"}), true, true},
		"to another bridge":           {legacyDrop, one(legacyRule{out: "bn01"}), true, false},
		"to one of a shorter name":    {legacyDrop, one(legacyRule{out: "bn"}), true, false},
		"to anything":                 {legacyDrop, one(legacyRule{out: "+"}), true, false},
		"about the bridge, no policy": {legacyAccept, one(legacyRule{in: "bn0"}), false, true},
	}
	for i, f := range legacyFamilies {
		own, larger, other := "10.99.0.0/24", "10.99.0.0/16", "10.98.0.0/24"
		if i == 1 {
			own, larger, other = "fd99::/64", "fd99::/48", "fd98::/64"
		}
		cases["from the subnet"] = table{legacyDrop, one(legacyRule{from: own}), true, true}
		cases["to the subnet"] = table{legacyDrop, one(legacyRule{to: own}), true, true}
		cases["to a larger one"] = table{legacyDrop, one(legacyRule{to: larger}), true, false}
		cases["to another one"] = table{legacyDrop, one(legacyRule{to: other}), true, false}
		for name, tc := range cases {
			drops, hasRule, err := f.inspect(f.table(tc.policy, tc.rules...), "bn0", legacySubnets)
			if err != nil || drops != tc.drops || hasRule != tc.hasRule {
				t.Errorf("%s, a table %s: drops %v, hasRule %v, %v; want %v, %v", f.tool, name, drops, hasRule, err, tc.drops, tc.hasRule)
			}
		}
		whole := f.table(legacyDrop, one(legacyRule{in: "bn0"})...)
		for cut := 1; cut < len(f.bytes(legacyRule{})); cut++ { // the last rule is not the policy
			if _, _, err := f.inspect(&legacyRules{whole.rules[:len(whole.rules)-cut], whole.policy}, "bn0", legacySubnets); err == nil {
				t.Errorf("%s: rules that lack %d bytes are accepted", f.tool, cut)
			}
		}
		if _, _, err := f.inspect(&legacyRules{whole.rules, whole.policy + 1}, "bn0", legacySubnets); err == nil {
			t.Errorf("%s: rules without a policy are accepted", f.tool)
		}
	}
}

func FuzzLegacyRules(f *testing.F) {
	for i, family := range legacyFamilies {
		for _, t := range []*legacyRules{family.table(legacyDrop), family.table(legacyAccept, legacyRule{in: "bn0", to: legacySubnets[i].String()}, legacyRule{out: "bn+", target: "LOG"})} {
			f.Add(i == 1, t.policy, t.rules)
		}
	}
	f.Fuzz(func(t *testing.T, v6 bool, policy int, data []byte) {
		family := legacyFamilies[0]
		if v6 {
			family = legacyFamilies[1]
		}
		drops, hasRule, err := family.inspect(&legacyRules{data, policy}, "bn0", legacySubnets)
		if err != nil && (drops || hasRule) {
			t.Errorf("truncated rules: drops %v, hasRule %v, %v", drops, hasRule, err)
		}
	})
}
