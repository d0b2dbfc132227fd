// Package nearest finds the known name that a misspelled name most likely means. Readers of
// configuration files use it for their messages about unknown keys.
package nearest

// Of returns the known name with the smallest edit distance from name. If there are several, it
// returns the first. It returns "" if known is empty.
func Of(name string, known []string) string {
	best, least := "", -1
	for _, k := range known {
		if d := Distance(name, k); least < 0 || d < least {
			best, least = k, d
		}
	}
	return best
}

// Distance returns the Levenshtein distance of two strings in bytes. It ignores the end of a long
// a, which would take too much time.
func Distance(a, b string) int {
	a = a[:min(len(a), 64)]
	row := make([]int, len(b)+1) // row[j]: distance of a[:i] and b[:j]
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0] // distance of a[:i] and b[:j]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
