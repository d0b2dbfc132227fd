package config

// keys returns the keys of all top-level options and tables.
func keys() []string {
	all := keysOf(options())
	for _, t := range tables() {
		all = append(all, t.Key)
	}
	return all
}

func keysOf(options []option) []string {
	var all []string
	for _, o := range options {
		all = append(all, o.Key)
	}
	return all
}

// nearest returns the known key with the smallest edit distance from key.
func nearest(key string, known []string) string {
	best, least := "", -1
	for _, k := range known {
		if d := distance(key, k); least < 0 || d < least {
			best, least = k, d
		}
	}
	return best
}

// distance returns the Levenshtein distance of two strings in bytes. It ignores the end of a long
// a, which would make it expensive.
func distance(a, b string) int {
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
