; Papers are delivered from home to the locations that want one. A location that is not safe cannot be left again.
(define (domain delivery)
  (:requirements :strips :typing)
  (:types location paper - object)
  (:predicates
    (at ?here - location)
    (home ?l - location)
    (safe ?l - location)
    (wants ?l - location)
    (satisfied ?l - location)
    (unpacked ?p - paper)
    (carrying ?p - paper))
  (:action pick-up
    :parameters (?p - paper ?l - location)
    :precondition (and (at ?l) (home ?l) (unpacked ?p))
    :effect (and (carrying ?p) (not (unpacked ?p))))
  (:action move
    :parameters (?from - location ?to - location)
    :precondition (and (at ?from) (safe ?from))
    :effect (and (at ?to) (not (at ?from))))
  (:action deliver
    :parameters (?p - paper ?l - location)
    :precondition (and (at ?l) (carrying ?p) (wants ?l))
    :effect (and (satisfied ?l) (not (carrying ?p)) (not (wants ?l)))))
